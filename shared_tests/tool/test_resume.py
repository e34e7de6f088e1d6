"""`shardiff bench ... --resume` measures only what is missing, and refuses a run with anything different."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bubbles import bubbles
from benchmarks.bubbles.plan import plan as plan_bubbles
from benchmarks.collectives import collectives
from benchmarks.documents import results_io, resume
from benchmarks.steps import steps
from contract.axes import STRATEGIES
from contract.problem import Problem
from shardiff.system import files, machine
from shared_tests.bench.report_documents import MACHINE
from shared_tests.tool.answers import say


def finished(document, blocks):
    """A document of an interrupted run that has these blocks, at another date."""
    document = json.loads(json.dumps(document))
    document["machine"]["date"] = "2026-01-01T00:00:00+00:00"
    document["runs"] = [{"date": "2026-01-01T00:00:00+00:00", "blocks": blocks}]
    return document


@pytest.fixture
def same_machine(monkeypatch):
    """Facts of a clean checkout; the date grows."""
    monkeypatch.setattr(machine, "facts", lambda: {**MACHINE, "date": "2026-11-29T00:00:00+00:00"})


def few(todo, kept):
    """The document of `shardiff bench collectives` with every measurement replaced, and what was measured."""
    asked = []

    def call(function, *args):
        asked.append(args)
        if args[0] == "identities":
            return [dict.fromkeys(collectives.IDENTITIES, 0.0)] * 2
        times = {"per_iteration": [1e-5, 2e-5], "amortized": [1e-5], "calls": 3}
        times["right"] = {"per_iteration": True, "amortized": True}
        return [[{"bytes": size, "runs_as": args[1], "correct": True, **times} for size in args[2]]] * 2

    saved = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_pool", lambda *_: call)
        patch.setattr(
            collectives, "floor", lambda ranks: {"memory_copy_GBps": 1.0, "loopback_GBps": {"1": 1.0, "2": 1.0}}
        )
        document = collectives.run(todo, lambda d: saved.append(json.loads(json.dumps(d))), kept=kept)
    return document, asked, saved


def test_an_interrupted_bench_collectives_measures_only_what_is_missing(same_machine, places, capsys):
    todo = collectives.plan(["all_reduce", "permute"], [2], ["4KiB", "8KiB", "16KiB"], None, "cpu")
    whole, asked, saved = few(todo, None)
    assert len(asked) == 6 and [run["date"] for run in whole["runs"]] == [whole["machine"]["date"]]
    for done in range(1, 6):
        left = finished(saved[done - 1], whole["runs"][0]["blocks"][:done])
        files.write(Path("a.json"), left)
        kept = resume.earlier(Path("a.json"), collectives.begin(todo))
        again, asked, _ = few(todo, kept)
        assert len(asked) == 6 - done
        assert [again[key] for key in ("rows", "fits", "identities")] == [
            whole[key] for key in ("rows", "fits", "identities")
        ]
        assert [(run["date"][:4], len(run["blocks"])) for run in again["runs"]] == [("2026", done), ("2026", 6 - done)]
        runs = results_io.parse("collectives", again).runs
        assert "blocks come from 2 runs" in (resume.sentence(runs) or "")
    assert resume.sentence(results_io.parse("collectives", whole).runs) is None


DIFFERENT = {
    "iterations": (lambda d: d["settings"].update(iterations=7), "iterations was 7, now it is 20"),
    "commit": (lambda d: d["machine"].update(commit="fedcba"), 'machine\'s commit was "fedcba"'),
    "versions": (lambda d: d["machine"]["versions"].update(torch="2.0"), "machine's versions was"),
    "no runs": (lambda d: d.pop("runs"), "no result of shardiff bench collectives that can be resumed"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_run_with_anything_different_is_not_resumed_and_says_what(what, same_machine, nothing_starts, places, capsys):
    todo = collectives.plan(["permute"], [2], ["4KiB"], None, "cpu")
    _, _, saved = few(todo, None)
    change, words = DIFFERENT[what]
    change(saved[0])
    files.write(Path("a.json"), saved[0])
    line = "bench collectives --op permute --ranks 2 --size 4KiB --device cpu --output a.json --resume"
    status, said = say(line.split(), capsys)
    assert status == 2 and words in said
    assert say(line.replace(" --resume", "").split(), capsys)[0] == 0
    Path("a.json").unlink()
    assert say(line.split(), capsys)[0] == 0  # nothing there yet: all is measured
    status, said = say([word for word in line.split() if word not in ("--output", "a.json")], capsys)
    assert status == 2 and "--resume needs --output FILE.json" in said


def test_a_checkout_with_changes_is_never_the_same_code(same_machine, places, monkeypatch):
    todo = collectives.plan(["permute"], [2], ["4KiB"], None, "cpu")
    monkeypatch.setattr(machine, "facts", lambda: {**MACHINE, "commit": "abc+"})
    _, _, saved = few(todo, None)
    files.write(Path("a.json"), saved[0])
    with pytest.raises(ValueError, match="the checkout has changes"):
        resume.earlier(Path("a.json"), collectives.begin(todo))


def test_bench_steps_resumes_by_strategy_and_ranks_which_are_measured_in_turn(same_machine, monkeypatch):
    plan = steps.plan([2, 4], STRATEGIES[:2], ["torch"], Problem(8, 16, 4), iterations=2, rounds=1, device="cpu")
    asked = []

    def strategy(plan, run, sets, starting):
        asked.append(steps.block(run))
        part = {"strategy": run.strategy, "ranks": run.world_size, "mesh": str(run.mesh)}
        yield {"rows": [{**part, "n": 1}], "ratios": [], "failures": [], "left_out": []}
        yield {
            "rows": [{**part, "n": 2}],
            "ratios": [part],
            "failures": [f"torch {steps.block(run)}: x"],
            "left_out": [],
        }

    monkeypatch.setattr(steps, "strategy", strategy)
    monkeypatch.setattr(steps, "sets", lambda plan, runs: _Nothing())
    saved = []
    whole = steps.measure(plan, lambda d: saved.append(json.loads(json.dumps(d))))
    assert len(asked) == 4 == len(whole["rows"])
    for at, left in enumerate(saved[:-1]):
        asked.clear()
        again = steps.measure(plan, kept=finished(left, left["runs"][0]["blocks"]))
        done = len(left["runs"][0]["blocks"])
        assert len(asked) == 4 - done, at
        assert [again[key] for key in ("rows", "ratios", "failures")] == [
            whole[key] for key in ("rows", "ratios", "failures")
        ]


class _Nothing:
    def __enter__(self):
        return {}

    def __exit__(self, *_):
        return None


def test_bench_bubbles_resumes_by_run(same_machine, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 4)
    plan = plan_bubbles([2], [1, 2, 4], ["torch"], Problem(8, 16, 4), 2, "cpu", schedules=["gpipe"])
    asked = []

    def row(run, by_rank, pace):
        asked.append(bubbles.block(run))
        return bubbles._row(run, "torch", [0.5], [0.1 / run.microbatches]), [
            bubbles.timeline.Event(0, "forward", 0, 0, 1)
        ]

    monkeypatch.setattr(bubbles, "torch_row", row)
    monkeypatch.setattr(bubbles, "pools", lambda plan, runs, stack: {True: lambda *_: None})
    saved = []
    whole = bubbles.measure(plan, lambda d: saved.append(json.loads(json.dumps(d))))
    asked.clear()
    again = bubbles.measure(plan, kept=finished(saved[1], saved[1]["runs"][0]["blocks"]))
    assert len(asked) == 1 and json.loads(json.dumps(again["rows"])) == json.loads(json.dumps(whole["rows"]))
    assert len(again["timelines"]) == 3 and again["fits"]
