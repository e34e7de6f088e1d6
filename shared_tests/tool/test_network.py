"""Seconds of communication: `shardiff.cost` against numbers worked out by hand, and the devices that plans are for."""

from __future__ import annotations

import json

import pytest

from shardiff import devices
from shardiff.compiling.hardware import FAMILIES
from shardiff.cost import Group, Link, Measured, Network, seconds
from shardiff.mesh import Mesh
from shardiff.program import Program
from shardiff.record import Executions, record

SLOW = Network(Link(100.0, 1.0), Link(40.0, 5.0), hosts=2, devices=4, interfaces=4, call=10.0)
MACHINE = {
    "kind": "machine",
    "name": "toy",
    "rates": {"float32": 2e9},
    "memory": 1e9,
    "memory_bandwidth": 2e9,
    "inside": {"bandwidth": 1e9},
}


def test_a_ring_inside_a_host_takes_its_wire_bytes_and_its_steps():
    # all_reduce on 4 ranks: 2 * 3/4 of 400 bytes over 100 bytes/s, and 6 steps of 1 s after a call of 10 s
    assert SLOW.seconds("all_reduce", 400, Group(4)) == pytest.approx(600 / 100 + 6 + 10)
    assert SLOW.seconds("all_gather", 400, Group(4)) == pytest.approx(300 / 100 + 3 + 10)
    assert SLOW.seconds("collective_permute", 400, Group(2)) == pytest.approx(400 / 100 + 1 + 10)
    assert SLOW.seconds("all_reduce", 400, Group(1)) == 0


def test_groups_over_hosts_share_what_a_host_can_send():
    # 2 members, one on each host: 1 step of the 1 waits for a host; 4 such groups share 40 bytes/s
    assert SLOW.seconds("all_gather", 400, Group(2, hosts=2, shared=4)) == pytest.approx(200 / 10 + 5 + 10)
    assert SLOW.bandwidth(Group(2, hosts=2, shared=8)) == 40 / 8
    # a single group has one of the four interfaces for its one member on a host, and 8 ranks have all of them
    assert SLOW.bandwidth(Group(2, hosts=2, shared=1)) == 10
    assert SLOW.bandwidth(Group(8, hosts=2, shared=1)) == 40


def test_what_a_library_was_measured_to_take_replaces_the_latency_and_stretches_the_bytes():
    network = Network(Link(100.0, 1.0), Link(100.0), measured={("reduce_scatter", 2): Measured(3.0, 2.0)})
    assert network.seconds("reduce_scatter", 400, Group(2)) == pytest.approx(2 * 200 / 100 + 3)
    assert network.latency("reduce_scatter", Group(5)) == pytest.approx(4 * 3)  # four times the steps
    assert network.latency("all_gather", Group(2)) == 1


def test_a_programs_seconds_are_by_axis_and_its_groups_share_the_links_that_they_use():
    mesh = Mesh((("dp", 2), ("tp", 4)))
    records = (
        record("all_reduce", "float32", 400, 4, groups=mesh.groups("tp"), executions=Executions(3, 3)),
        record("all_gather", "float32", 400, 2, groups=mesh.groups("dp")),
        record("collective_permute", "float32", 400, None, edges=((0, 4),)),
    )
    found = seconds(Program(records, mesh=mesh), SLOW)
    assert found["tp"] == pytest.approx(3 * (600 / 100 + 6 + 10))
    assert found["dp"] == pytest.approx((200 / 10 + 5 + 10) + (400 / 10 + 5 + 10))
    with pytest.raises(ValueError, match="rank 8 is not on a network of 2 x 4 devices"):
        seconds([record("collective_permute", "float32", 4, None, edges=((0, 8),))], SLOW)


@pytest.mark.parametrize("name", devices.DATASHEETS)
def test_every_device_has_rates_links_and_sources(name):
    machine = devices.parse(f"{name}:4x8")
    network, sheet = machine.network, devices.DATASHEETS[name]
    assert (network.hosts, network.devices, network.size) == (4, 8, 32)
    assert machine.device.rate("bfloat16") == pytest.approx(devices.ATTAINED * sheet.peak["bfloat16"])
    assert machine.device.memory == FAMILIES[name].memory and machine.links_source
    assert network.between.bandwidth == sheet.interface * 8 / sheet.shared_by < network.inside.bandwidth * 8
    assert any("datasheet" in source or "documentation" in source for source in machine.device.sources)


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("h100", "needs a size"),
        ("h100:0x8", "needs a size"),
        ("h100:axb", "needs a size"),
        ("h101:8", "unknown devices 'h101'; known: a100"),
        ("h100:9999x9999", "at most 65,536 devices"),
    ],
)
def test_what_is_no_machine_is_refused_in_one_line(text, flaw):
    with pytest.raises(ValueError, match=flaw) as caught:
        devices.parse(text)
    assert "\n" not in str(caught.value)


def test_tpus_have_no_float64():
    with pytest.raises(ValueError, match="v5e has no rate for float64; it has float32, bfloat16"):
        devices.parse("v5e:4").device.rate("float64")


def test_a_machine_is_read_from_a_file(tmp_path):
    path = tmp_path / "toy.json"
    collectives = [{"op": "all_reduce", "ranks": 2, "latency": 0.5, "overhead": 1.5}]
    path.write_text(json.dumps(MACHINE | {"hosts": 2, "roofline": False, "collectives": collectives}))
    machine = devices.read(path)
    assert machine.network.between == machine.network.inside == Link(1e9)
    assert machine.network.measured["all_reduce", 2] == Measured(0.5, 1.5)
    assert devices.sized(machine, 3, 5).network.size == 15


@pytest.mark.parametrize(
    ("change", "flaw"),
    [
        ({"kind": "plan"}, "not a machine"),
        ({"memory": -1}, "memory"),
        ({"speed": 1}, "speed"),
        ({"inside": {"bandwidth": 0}}, "bandwidth"),
        ({"schema": 2}, "schema 2"),
    ],
)
def test_a_malformed_machine_is_refused_in_one_line(tmp_path, change, flaw):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(MACHINE | change))
    with pytest.raises(ValueError, match=flaw) as caught:
        devices.read(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
