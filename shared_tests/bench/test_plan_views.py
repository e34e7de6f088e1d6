"""What `shardiff plan` prints: meshes that do not fit, crossovers, what XLA derives, and machines read from files."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.plan import compiled as compiling
from benchmarks.plan import plan as planning
from benchmarks.plan import priced, view
from contract.axes import parse_axes
from contract.planner.crossings import Crossing
from contract.planner.search import Asked
from contract.problem import Problem
from contract.strategy import Run
from shardiff import devices
from shardiff.cli import main as cli

ASKED = Asked(Problem(512, 1024, 4, "bfloat16"))
EIGHT = devices.parse("h100:1x8")
MACHINE = {
    "kind": "machine",
    "name": "little",
    "rates": {"float32": 1e12},
    "memory": 10**9,
    "memory_bandwidth": 1e11,
    "inside": {"bandwidth": 1e10, "latency": 1e-6},
    "devices": 2,
}


def printed(parts) -> str:
    console = Console(width=160, file=io.StringIO())
    for part in parts:
        console.print(part, markup=False, highlight=False) if isinstance(part, str) else console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def answer() -> planning.Plan:
    """Eight devices that have too little memory for most meshes; nothing is asked about crossovers."""
    few = replace(EIGHT, device=replace(EIGHT.device, memory=17e6))
    return planning.plan(few, ASKED, most=3, crossovers=False)


def test_meshes_that_do_not_fit_are_named_with_what_they_need(answer):
    ranking = answer.ranking
    assert ranking.best and len(ranking.too_large) > view.SHOWN_TOO_LARGE
    out = printed(view.parts(answer))
    assert (
        f"{len(ranking.too_large)} meshes do not fit into 17 MB: " in out
        and out.count(" needs ") == view.SHOWN_TOO_LARGE
    )
    assert ", ...\n" in out and "crossovers: add --crossovers" in out
    assert all(one["memory_bytes"] > 17e6 and not one["fits"] for one in planning.document(answer)["too_large"])


def test_where_nothing_fits_there_is_no_table(answer):
    none = planning.plan(replace(EIGHT, device=replace(EIGHT.device, memory=1e3)), ASKED, crossovers=False)
    out = printed(view.parts(none))
    assert not none.ranking.best and "meshes do not fit into 1 kB" in out and "fastest" not in out


def test_crossovers_are_intervals_with_the_fastest_mesh_of_each(answer):
    a, b, c = (Run("torch", parse_axes(f"{axis}=8"), ASKED.problem) for axis in ("dp", "fsdp", "tp"))
    found = replace(answer, links=[Crossing(1e9, a, b, 1.0), Crossing(5e10, b, c, 0.5)], batch=[])
    lines = list(view.crossovers(found))
    assert lines[:4] == [
        "\nover the rate of the links inside a host, the fastest mesh is",
        "  up to 1 GB/s: dp=8",
        "  1 GB/s to 50 GB/s: fsdp=8",
        "  above 50 GB/s: tp=8",
    ]
    assert lines[4] == "\nover the batch, the same mesh stays the fastest"
    assert list(view.crossovers(replace(found, links=None, batch=None)))[-1].startswith("crossovers: add")
    assert view.rate_text(125e6) == "1000 Mbit/s" and view.flops_text(2e9) == "2 GFLOP/s"


def test_what_xla_derives_stands_beside_the_closed_form(answer, monkeypatch, capsys):
    run = Run("torch", parse_axes("dp=2,tp=4"), ASKED.problem)
    closed = priced.closed_form(run, EIGHT)
    derived = replace(closed, flops=2 * closed.flops, communication={"tp": 0.0})
    found = [priced.Compiled(run, "h100:8", closed, derived)]
    out = printed(view.compiled(found, EIGHT))
    (line,) = (line for line in out.splitlines() if line.strip().startswith("dp=2,tp=4"))
    assert line.split()[2] == "2.00" and "what XLA derives for h100:8" in out
    assert "none of the first meshes can be written as annotations" in printed(view.compiled([], EIGHT))
    with pytest.raises(ValueError, match="h100:4 has 4 devices, and the plan is for 8"):
        compiling.compile_meshes([run], "h100:4", EIGHT)

    monkeypatch.setattr(compiling, "compile_meshes", lambda runs, target, machine: found)
    line = ["plan", "--devices", "h100:8", "--batch", "512", "--width", "1024", "--layers", "4", "--no-crossovers"]
    assert cli.main([*line, "--mesh", "dp=2,tp=4", "--target", "h100:8"]) == 0
    out = capsys.readouterr().out
    assert "fastest" in out and "what XLA derives for h100:8" in out


def test_a_machine_comes_from_a_file_in_any_number_and_with_other_rates(tmp_path):
    file = tmp_path / "little.json"
    file.write_text(json.dumps(MACHINE))
    assert planning.machine_of(str(file)).network.size == 2
    more = planning.machine_of(f"{file}:3x4", inside="2GB/s", between="100mbit")
    assert (more.network.hosts, more.network.devices) == (3, 4)
    assert more.network.inside.bandwidth == 2e9 and more.network.between.bandwidth == 12.5e6
    with pytest.raises(ValueError, match="a size is hosts x devices of each, such as 4x8, got '4y8'"):
        planning.machine_of(f"{file}:4y8")


@pytest.mark.parametrize("rate", ["0gbit", "25", "fast", "25 bits"])
def test_a_rate_without_a_number_or_a_unit_is_refused(rate):
    with pytest.raises(ValueError, match="a rate is a number and a unit"):
        planning.rate_of(rate)


def test_sizes_for_which_no_mesh_can_work_are_refused():
    with pytest.raises(ValueError, match="no mesh of 8 devices can work for these sizes; "):
        planning.plan(EIGHT, Asked(Problem(1, 1, 1)))
    with pytest.raises(ValueError, match="layers"):
        planning.runs_of("pp=8", Asked(Problem(8, 8, 1)), EIGHT)
