"""The planner: its steps against times worked out by hand, closed forms of bubbles, and a search of all meshes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from contract import cost
from contract.axes import USUAL, parse_axes
from contract.planner import crossings, search
from contract.planner.bounds import replayed, rough, stage_of, stages_of
from contract.planner.instructions import Begin, Compute, End, Post, Receive, Send
from contract.planner.places import Place, everyone, placement
from contract.planner.predict import predict
from contract.planner.program import step
from contract.planner.search import Asked
from contract.planner.simulate import Stuck, simulate
from contract.problem import Problem
from contract.schedule import SCHEDULES, Action, make
from contract.schedule_time import play
from contract.strategy import Run
from shardiff.cost import Group, Link, Measured, Network
from shardiff.devices import Device, Machine

RATE, MEMORY = 1e9, 1e9
PROBLEM = Problem(64, 32, 4)
UNIT = 2 * 64 * 32 * 32 / RATE  # one product of a layer
FREE = 1e15


def machine(hosts: int = 1, devices: int = 4, inside: float = 1e7, between: float | None = None, **link) -> Machine:
    device = Device("paced", {"float32": RATE, "bfloat16": RATE}, 1e12, MEMORY, roofline=False)
    return Machine(device, Network(Link(inside, **link), Link(between or inside, **link), hosts, devices))


def run(mesh: str, problem: Problem = PROBLEM, **fields) -> Run:
    strategies = fields.pop("strategies", ())
    return Run(axes=parse_axes(mesh, strategies), problem=problem, **fields)


def test_a_step_without_communication_is_its_products_and_its_update():
    found = predict(run("dp=1"), machine(devices=1))
    assert found.compute == pytest.approx((3 * 4 - 1) * UNIT)
    assert found.update == pytest.approx(7 * 4 * 4 * (32 * 32 + 32) / MEMORY)
    assert found.seconds == pytest.approx(found.compute + found.update)


def test_megatron_waits_for_every_all_reduce():
    found = predict(run("tp=2"), machine(devices=2))
    each = 64 * 32 * 4 / 1e7  # 2 (n - 1) / n of the payload is the payload
    assert found.exposed["tp"] == pytest.approx(3 * each)
    assert found.seconds == pytest.approx((3 * 4 - 1) * UNIT / 2 + 3 * each + found.update)


def test_data_parallel_hides_all_buckets_but_what_the_backward_pass_does_not_cover():
    problem = Problem(64, 2048, 2)  # a layer's weight fills a bucket
    of_link = machine(devices=2, inside=2e8)
    found = predict(run("dp=2", problem), of_link)
    unit = 2 * 32 * 2048 * 2048 / RATE
    weight, biases = 4 * 2048 * 2048 / 2e8, 2 * 4 * 2048 / 2e8
    # forward 2; the bucket of w1 leaves after both products of layer 1, that of w0 after the product of layer 0
    end = max(2 * unit + 2 * unit + weight, 5 * unit) + weight + biases
    assert found.seconds == pytest.approx(end + found.update)
    assert found.exposed["dp"] == pytest.approx(end - 5 * unit)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_pipeline_whose_messages_take_no_time_takes_as_long_as_its_schedule_played(name):
    schedule = make(name, 2, 4)
    one = Run(axes=parse_axes("pp=2"), problem=Problem(64, 32, 8), microbatches=4, schedule=name)
    found = predict(one, machine(devices=2, inside=FREE))
    layers = 8 // len(schedule.parts)

    def products(action: Action) -> int:
        of_input = layers - (schedule.part(action) == 0)  # the batch needs no gradient
        return {"forward": layers, "backward": layers + of_input, "backward_input": of_input}.get(action.kind, layers)

    played = play(schedule, {action: products(action) for order in schedule.orders for action in order})
    unit = 2 * 16 * 32 * 32 / RATE
    assert found.seconds - found.update == pytest.approx(unit * max(end for _, end in played.values()))
    assert found.seconds - found.update - found.bubble == pytest.approx(found.compute)


MESHES = ["dp=4", "tp=4", "pp=4", "dp=2,tp=2", "tp=2,dp=2", "pp=2,dp=2", "dp=2,pp=2", "pp=2,tp=2", "tp=2,pp=2"]


@pytest.mark.parametrize("mesh", MESHES)
def test_the_parts_of_a_step_add_up_and_bounds_are_below_it(mesh):
    problem = Problem(64, 32, 8)
    one, where = run(mesh, problem), machine(2, 2, 1e7, 5e6, latency=1e-5)
    found = predict(one, where)
    parts = found.compute + sum(found.exposed.values()) + found.bubble + found.update + found.overhead
    assert parts == pytest.approx(found.seconds)
    placed = placement(one, where.network)
    least = rough(one, stage_of(one, 0, where), placed, where.network)
    assert least <= found.seconds * (1 + 1e-9)
    if len(placed.ranks) > 1:
        again = replayed(one, stages_of(one, where, placed.ranks), placed, where.network).seconds
        assert least <= again * (1 + 1e-9) and again <= found.seconds * (1 + 1e-9)


@pytest.mark.parametrize("mesh", ["dp=4", "tp=2", "dp=2,tp=2", "pp=2,tp=2", "dp=2,pp=2", "dp=2,pp=2,tp=2"])
def test_what_rank_0_sends_is_what_the_closed_form_of_communication_says(mesh):
    one = run(mesh, Problem(64, 32, 8))
    device = machine().device
    sent: Counter[tuple[str, str]] = Counter()
    for rank in placement(one, machine(1, one.world_size).network).ranks:
        for each in step(one, rank, device):
            if isinstance(each, Begin):
                sent[each.axis, each.op] += each.payload
            elif isinstance(each, Send):
                sent["pp", "collective_permute"] += each.size
    wanted: Counter[tuple[str, str]] = Counter()
    for each in cost.communication(one):
        groups = each.edges if each.edges is not None else each.groups
        # of the ranks that differ in pp alone: those with rank 0's other coordinates
        here = placement(one, machine(1, one.world_size).network).ranks
        counted = [rank for group in groups or () for rank in (group if each.axis == "pp" else group[:1])]
        of = counted if each.edges is None else [group[0] for group in groups or ()]
        wanted[each.axis or "", each.op] += sum(rank in here for rank in of) * each.payload_bytes
    assert sent == wanted


def pair(network: Network, group: Group) -> tuple[Place, ...]:
    return (Place(0, {"a": group, "b": group}, group.shared),)


def test_transfers_on_one_link_share_it_and_the_first_of_them_ends_later():
    network = Network(Link(100.0), Link(100.0))
    both = [Begin("a", "a", "collective_permute", 100), Begin("b", "b", "collective_permute", 300), End("a"), End("b")]
    found = simulate([both], pair(network, Group(2)), network)
    assert found.waits[0]["a"] == pytest.approx(2.0)  # half the rate each, until the first is done
    assert found.seconds == pytest.approx(4.0)
    queued = [Begin("1", "a", "collective_permute", 100), Begin("2", "a", "collective_permute", 300), End("1")]
    assert simulate([queued], pair(network, Group(2)), network).seconds == pytest.approx(1.0)  # one after the other


GATHER, SUM = "all_gather", "all_reduce"


@pytest.mark.parametrize(
    ("ops", "ends"),
    [
        ([GATHER], [0.75]),  # gloo on a link of 10 Mbit/s, two ranks of 256 KiB and a burst: 0.71
        ([GATHER, GATHER], [0.75, 1.25]),  # 0.71 and 1.22
        ([GATHER, GATHER, GATHER], [0.75, 1.25, 1.75]),  # 0.72, 1.22 and 1.72
        ([GATHER, SUM], [0.75, 1.75]),  # 0.72 and 1.72
        ([SUM, GATHER], [1.75, 1.25]),  # 1.71 and 1.23
        ([SUM, SUM], [1.5, 2.0]),  # 1.52 and 2.02
        ([SUM, SUM, SUM], [1.5, 2.0, 3.0]),  # 1.52, 2.02 and 3.03
    ],
)
def test_two_collectives_of_a_group_run_at_once_where_the_library_does_that(ops, ends):
    measured = {(GATHER, 2): Measured(0.0, 1.5, 1.0), (SUM, 2): Measured(0.0, 1.0, 1.0, rounds=2)}
    network = Network(Link(100.0), Link(100.0), measured=measured, together=2)
    begun = [Begin(f"a {i}", "a", op, 100) for i, op in enumerate(ops)]
    for i, end in enumerate(ends):
        assert simulate([[*begun, End(f"a {i}")]], pair(network, Group(2)), network).waits[0]["a"] == pytest.approx(end)


def test_groups_take_turns_on_a_link_between_hosts_and_the_second_one_is_done_later():
    measured = {(SUM, 2): Measured(0.0, 1.0, rounds=2)}
    network = Network(Link(FREE), Link(100.0, window=50.0), 2, 2, measured=measured)
    places = everyone(run("tp=2,dp=2"), network).places
    one = [Begin("tp 1", "tp", SUM, 100), End("tp 1")]
    work = [Compute(1.0, "forward")]
    assert simulate([one] * 4, places, network).ends == pytest.approx((1.5, 2.0, 1.5, 2.0))  # gloo: 1.45 and 1.95
    # one group computes while the other one sends
    assert simulate([[*one, *work, *one]] * 4, places, network).seconds == pytest.approx(4.5)
    together = replace(network, between=Link(100.0))
    assert simulate([[*one, *work, *one]] * 4, places, together).seconds == pytest.approx(5.0)
    shared = machine(2, 2, FREE, 1e7)
    apart = replace(shared, network=replace(shared.network, between=Link(1e7, window=2048.0)))
    assert predict(run("tp=2,dp=2"), apart).seconds < 0.95 * predict(run("tp=2,dp=2"), shared).seconds


def test_a_pipeline_of_which_every_rank_is_simulated_sends_along_its_own_stages():
    one, windows = run("pp=2,dp=2"), Network(Link(1e7), Link(1e6, window=1e3), 2, 2)
    where = replace(machine(2, 2, 1e7, 1e6), network=windows)
    shared, each = predict(one, machine(2, 2, 1e7, 1e6)), predict(one, where)
    assert each.seconds == pytest.approx(shared.seconds, rel=0.1)
    assert each.compute == shared.compute and each.bubble > 0
    assert everyone(run("fsdp=2,pp=2"), windows).places[0].groups["fsdp"].shared == 2  # one of each stage


def test_layers_that_are_taken_in_pairs_are_gathered_and_scattered_in_pairs():
    """The order of torch_impl, as a trace of a step has it; - is a wait."""
    told = []
    for each in step(run("fsdp=2,tp=2"), 0, machine().device):
        if isinstance(each, Begin | End):
            name = re.sub(r"gradient of |the |fsdp | and b\d", "", each.key)
            told.append(name if isinstance(each, Begin) else f"-{name}")
        elif isinstance(each, Compute) and each.what != "update":
            told.append("*")
    assert told == [
        *("w0", "w1", "-w0", "w2", "-w1", "*", "*", "tp output of layer 1", "-tp output of layer 1"),
        *("w3", "-w2", "-w3", "*", "*", "tp output of layer 3", "-tp output of layer 3", "loss"),
        *("w3", "w2", "-w3", "*", "w1", "-w2", "*", "tp input of layer 2", "-tp input of layer 2"),
        *("w3", "-w3", "w2", "-w1", "*", "*", "-w2", "w1", "-w1", "w0", "-w0", "-loss"),
    ]


def test_a_burst_passes_at_once_and_comes_back_while_the_link_is_idle():
    network = Network(Link(100.0, burst=50.0), Link(100.0))
    send = [Begin("1", "a", "collective_permute", 100), End("1")]
    twice = [*send, *send]
    place = pair(network, Group(2))
    assert simulate([send], place, network).seconds == pytest.approx(0.5)
    assert simulate([twice], place, network).seconds == pytest.approx(0.5 + 1.0)
    assert simulate([[*send, Compute(0.5, "forward"), *send]], place, network).seconds == pytest.approx(1.5)


def test_a_message_moves_once_it_is_sent_and_its_receiver_is_ready():
    network = Network(Link(100.0), Link(100.0))
    places = (Place(0, {"pp": Group(2)}), Place(0, {"pp": Group(2)}))
    sender = [Compute(1.0, "forward"), Send("m", 1, 100)]
    early = [Post("m"), Receive("m")]
    late = [Compute(5.0, "forward"), Post("m"), Receive("m")]
    assert simulate([sender, early], places, network).seconds == pytest.approx(2.0)
    assert simulate([sender, late], places, network).seconds == pytest.approx(6.0)
    with pytest.raises(Stuck, match="rank 1 waits forever for Receive"):
        simulate([sender, [Receive("m")]], places, network)


def test_groups_on_one_host_share_its_links_to_the_other():
    narrow = machine(2, 2, FREE, 1e6)
    inside = predict(run("dp=2,tp=2"), narrow)
    across = predict(run("tp=2,dp=2"), narrow)
    rows = 32 * 32 * 4  # bytes of a rank's activations
    assert across.exposed["tp"] == pytest.approx(3 * rows / (1e6 / 2), rel=1e-3)  # two groups, each half of the link
    assert inside.exposed["tp"] == pytest.approx(0, abs=1e-6)


def test_all_axes_of_the_usual_strategies_are_searched():
    found, _ = search.candidates(machine(4, 4), Asked(Problem(64, 32, 8)))
    assert {axis.name for one in found for axis in one.run.axes} == set(USUAL)
    meshes = {str(one.run.mesh) for one in found}
    assert {"dp=16", "tp=16", "dp=4,tp=4", "tp=4,dp=4", "pp=2,dp=2,tp=4"} <= meshes
    assert all(one.run.world_size == 16 for one in found)


def test_the_ranking_is_that_of_simulating_every_mesh():
    where, asked = machine(2, 4, 3e7, 1e7, latency=2e-5), Asked(Problem(64, 64, 8), microbatches=(2, 8))
    found, refused = search.candidates(where, asked)
    best = search.ranked(found, where, refused, 5).best
    times = sorted(predict(one.run, where).seconds for one in found)
    assert [one.seconds for one in best] == pytest.approx(times[:5])


def test_crossovers_are_where_two_meshes_take_as_long_and_no_other_takes_less():
    where, asked = machine(1, 4, 2e7), Asked(Problem(64, 64, 4), microbatches=(4,))
    found, _ = search.candidates(where, asked)
    crossed = crossings.over_links(found, where)
    assert crossed
    for one in crossed:
        at = crossings.with_rate(where, "inside", one.at)
        assert predict(one.before, at).seconds == pytest.approx(predict(one.after, at).seconds, rel=0.01)
    rates = [2e7 * 2.0**k for k in range(-4, 5)]
    for rate in rates:
        here = [one for one in crossed if one.at <= rate]
        winner = here[-1].after if here else crossed[0].before
        at = crossings.with_rate(where, "inside", rate)
        assert predict(winner, at).seconds <= search.fastest(found, at, 1)[0].seconds * 1.001


def test_twice_the_links_help_where_links_are_what_a_step_waits_for():
    slow = predict(run("tp=4"), machine(1, 4, 1e5))
    gains = crossings.sensitivity(slow, machine(1, 4, 1e5))
    assert gains["links inside a host"] < 0.6 * slow.seconds and gains["compute"] > 0.9 * slow.seconds
    fast = predict(run("tp=4"), machine(1, 4, FREE))
    assert crossings.sensitivity(fast, machine(1, 4, FREE))["compute"] < 0.8 * fast.seconds


def test_a_mesh_that_does_not_fit_is_not_ranked():
    small = machine(1, 4)
    needs = max(one.needs for one in search.candidates(small, Asked(PROBLEM))[0])
    small = replace(small, device=replace(small.device, memory=needs - 1))
    parameters = 4 * 4 * (32 * 32 + 32)
    whole = 4 * parameters + predict(run("dp=4"), small).memory.activations  # with gradients and two arrays of AdamW
    for memory, fits in ((whole, True), (whole - 1, False)):
        assert predict(run("dp=4"), replace(small, device=replace(small.device, memory=memory))).fits == fits
    found = search.rank(small, Asked(PROBLEM))
    assert found.too_large and all(one.fits for one in found.best)
    assert all(one.needs > small.device.memory for one in found.too_large)


def test_a_mesh_of_another_size_than_the_machine_is_refused():
    with pytest.raises(ValueError, match="the mesh dp=2 has 2 ranks, and there are 1 x 4 devices"):
        predict(run("dp=2"), machine(1, 4))
