"""`shardiff plan --prove`: two ranks over shaped links, what is refused, and what is left when it is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.collectives import wire
from benchmarks.lab.lab import Lab, open_lab, refusal
from benchmarks.lab.namespaces import Shape
from benchmarks.plan.prove import answer, calibrate
from benchmarks.plan.prove import campaign as campaigns
from benchmarks.plan.prove.campaign import Campaign, measured
from benchmarks.plan.prove.steps import Paced
from benchmarks.plan.prove.summary import mesh_of
from contract.axes import parse_axes
from contract.planner.predict import seconds_of
from contract.problem import Problem
from contract.strategy import Run
from shardiff.cli import main as cli

ROOT = Path(__file__).parents[2]
PACED = Paced(2e9, 2e9)
PROBLEM = Problem(128, 256, 4)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if why := refusal():
        pytest.skip(why)
    with open_lab(Shape(1, 2)) as lab:
        yield lab


@pytest.fixture(scope="module")
def gloo(lab) -> calibrate.Gloo:
    return calibrate.measure(lab)


@pytest.fixture
def opened(lab, gloo, monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """Whoever opens a lab gets the one that is open, whose collectives have been measured. Returns the shapes."""
    shapes: list[Shape] = []

    @contextmanager
    def again(shape: Shape) -> Iterator[Lab]:
        shapes.append(shape)
        yield lab

    for module in (campaigns, wire):
        monkeypatch.setattr(module, "open_lab", again)
    monkeypatch.setattr(calibrate, "measure", lambda *asked: gloo)
    return shapes


def run(mesh: str, problem: Problem = PROBLEM) -> Run:
    return Run(axes=parse_axes(mesh), problem=problem, steps=1, microbatches=2, device="cpu")


def test_the_faster_of_two_meshes_changes_where_the_plan_says(lab, gloo):
    """On a device and links that are slow enough for a busy machine: the crossover is at about 40 Mbit/s."""
    slow, wide, narrow = Paced(2e8, 4e8), *(run(mesh, Problem(128, 128, 4)) for mesh in ("dp=2", "pp=2"))

    def predicted(one: Run, rate: float) -> float:
        return seconds_of(one, calibrate.machine(lab.shape, rate, gloo, slow))

    low, high = 1e6, 1e9
    assert predicted(wide, low) > predicted(narrow, low) and predicted(wide, high) < predicted(narrow, high)
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if predicted(wide, middle) > predicted(narrow, middle) else (low, middle)
    times = {}
    for factor in (0.5, 5):
        lab.rates(factor * low, None)
        calibrate.check_rate(lab, factor * low)
        for one in (wide, narrow):
            found = measured(one, lab.call(calibrate.STEPS, "steps", one, slow, 2), gloo)
            times[str(one.mesh), factor] = min(found["samples"])
            assert found["memory_bytes"] > 0 and len(found["sent_bytes"]) == 2
    assert times["dp=2", 0.5] > times["pp=2", 0.5]
    assert times["dp=2", 5] < times["pp=2", 5]


@pytest.mark.parametrize("paced", [PACED, None], ids=["paced", "real"])
def test_a_campaign_predicts_all_then_runs_all_and_is_saved_as_it_grows(opened, paced, capsys, monkeypatch):
    saved: list[str] = []
    monkeypatch.setattr(answer.bench, "keeper", lambda output: lambda document: saved.append(json.dumps(document)) or 1)
    rate = 500e6 if paced else 100e6
    small = Campaign((Shape(1, 2),), (rate,), (Problem(32, 64, 4),), ("dp=2", "tp=2"), paced, iterations=1)
    assert answer.answer(small, None, as_json=False) == 0
    first, *_, last = map(json.loads, saved)
    assert [one["measured"] for one in first["configurations"]] == [None, None] and not first["complete"]
    assert last["complete"] and last["summary"]["configurations"] == 2
    assert {mesh_of(one) for one in last["configurations"]} == {"dp=2", "tp=2"}
    for one, before in zip(last["configurations"], first["configurations"], strict=True):
        assert one["predicted"] == before["predicted"]
        assert 0 < one["measured"]["difference"] <= campaigns.TOLERANCE
        assert len(one["measured"]["sent_bytes"]) == 2 and one["measured"]["memory_bytes"] > 0
    assert [one["mesh"] for one in last["labs"][0]["unhidden"]] == [{"tp": 2}, {"dp": 2}]
    assert len(last["labs"][0]["flops_per_second"]) == (paced is None)
    assert opened == [Shape(1, 2)]
    out = capsys.readouterr().out
    lines = [line.split()[:7] for line in out.splitlines()]
    assert all(["1x2", f"{rate / 1e6:g}", "Mbit/s", mesh, "32", "x", "64"] in lines for mesh in ("dp=2", "tp=2"))
    assert "simulation: median error" in out and "memory: median error" in out


def test_a_proof_that_fails_has_status_1_and_a_lab_that_fails_3(opened, lab, monkeypatch, capsys):
    small = Campaign((Shape(1, 2),), (500e6,), (Problem(32, 64, 4),), ("dp=2",), PACED, iterations=1)

    def too_fast(lab, rate):
        raise ValueError("a plain stream reaches 2.00 of a link")

    monkeypatch.setattr(calibrate, "check_rate", too_fast)
    assert answer.answer(small, None, as_json=True) == 1
    monkeypatch.setattr(lab, "rates", lambda *rates: (_ for _ in ()).throw(answer.LabError("the lab has ended")))
    assert answer.answer(small, None, as_json=True) == 3
    out, err = capsys.readouterr()
    assert out == "" and err == "shardiff: a plain stream reaches 2.00 of a link\nshardiff: the lab has ended\n"


def test_a_link_that_is_faster_than_stated_fails_a_proof(lab):
    lab.rates(None, None)
    with pytest.raises(ValueError, match=r"a plain stream reaches \d+.* of a link of 80 Mbit/s in the last of 5 tries"):
        calibrate.check_rate(lab, 80e6)


def test_what_passes_the_interfaces_is_counted_beside_the_optimal_bytes(opened, capsys):
    arguments = [
        "--wire",
        "--ranks",
        "2",
        "--max",
        "256KiB",
        "--iterations",
        "1",
        "--json",
        "--implementation",
        "torch",
    ]
    assert cli.main(["bench", "collectives", *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    of_optimal = {row["op"]: row["bytes_over_optimal"] for row in document["rows"]}
    assert {"all_reduce", "all_gather", "broadcast", "reduce_scatter by messages"} <= of_optimal.keys()
    for op in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter by all_to_all", "collective_permute"):
        assert of_optimal[op] == pytest.approx(1, abs=0.1), op
    assert of_optimal["reduce_scatter"] == pytest.approx(2, abs=0.2)  # gloo's own sends twice the bytes
    assert all(row["seconds_over_optimal"] > 0.9 for row in document["rows"] if row["op"] == "all_reduce")
    assert opened == [Shape(1, 2)]


def test_a_rank_that_fails_is_named_with_its_error_and_the_lab_ends(lab):
    ranks = psutil.Process(lab.process.pid).children()
    assert len(ranks) == 2
    with pytest.raises(RuntimeError, match=r"rank \d failed in stream: [\s\S]*TypeError"):
        lab.call(calibrate.TRAFFIC, "stream", "many", 0, 1)
    lab.process.wait(10)
    assert psutil.wait_procs(ranks, 10)[1] == []


def test_nothing_is_left_of_a_proof_whose_parent_is_killed():
    if why := refusal():
        pytest.skip(why)
    script = "from benchmarks.lab.lab import *\nwith open_lab(Shape(1, 2)): pass"
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    started: list[psutil.Process] = []
    until = time.monotonic() + 60
    while len(started) < 3 and time.monotonic() < until:  # the lab and its two ranks
        started = psutil.Process(parent.pid).children(recursive=True)
        time.sleep(0.05)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert len(started) >= 3
    assert psutil.wait_procs(started, 20)[1] == []


def test_a_machine_without_namespaces_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert cli.main(["plan", "--prove"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == "shardiff: plan --prove: unshare is missing; install util-linux\n"


@pytest.mark.parametrize(
    ("options", "flaw"),
    [
        (["--shape", "2"], "a shape is hosts x ranks of each"),
        (["--shape", "1x1"], "a shape has 2 to 16 ranks"),
        (["--mesh", "dp=8"], "the mesh dp=8 cannot run with these sizes"),
        (["--dtype", "bfloat16"], "a proof runs in float32"),
        (["--rate", "fast"], "a rate is a number and a unit"),
    ],
)
def test_a_wrong_proof_is_refused_before_anything_starts(options, flaw, capsys):
    assert cli.main(["plan", "--prove", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and flaw in err and err.count("\n") == 1


def test_shapes_and_rates_are_for_a_proof_only(capsys):
    assert cli.main(["plan", "--shape", "1x2"]) == 2
    assert "--shape is for --prove" in capsys.readouterr().err
