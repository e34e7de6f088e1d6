"""`shardiff bench bubbles`: the bubble of synthetic timelines, and that the recorder sees what the schedule says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bubbles import bubbles, picture, timeline, view
from benchmarks.bubbles.plan import plan
from benchmarks.documents.bubbles import Bubbles, Event
from benchmarks.documents.results_io import parse_as
from contract.axes import one_axis
from contract.problem import Problem
from contract.schedule import SCHEDULES, Action, actions, gpipe, make
from contract.schedule_time import bubble_fraction, closed_form
from contract.strategy import Run
from shared_tests.bench.pools import shared

SMALL = Problem(batch=8, width=16, layers=4)


@pytest.fixture(scope="module", autouse=True)
def ranks(pool):
    with shared(pool):
        yield


SHAPES = [(p, m) for p in (2, 3, 4) for m in (1, 2, 5, 8)]


def played(stages, microbatches, forward=100, backward=200, slower=0):
    """The schedule replayed, with the backward passes of stage 0 shorter by `slower`."""
    schedule = gpipe(stages, microbatches)
    taken = {
        action: forward if action.kind == "forward" else backward - slower * (stage == 0)
        for stage in range(stages)
        for action in actions(schedule, stage)
    }
    return timeline.replay(schedule, taken)


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
@pytest.mark.parametrize("backward", [100, 200, 317])
def test_stages_that_are_alike_have_the_closed_form_s_bubble_however_long_a_backward_pass_takes(
    stages, microbatches, backward
):
    events = played(stages, microbatches, backward=backward)
    assert timeline.bubble(events) == pytest.approx(float(closed_form("gpipe", stages, microbatches) or 0))
    first, last = timeline.span(events)
    assert last - first == (microbatches + stages - 1) * (100 + backward)


def test_a_stage_with_less_to_do_adds_to_the_bubble():
    # Stage 1 works 6 units a microbatch, stage 0 works 5 and waits for it: busy 11 m of 2 (6 m + 5).
    events = played(2, 8, forward=200, backward=400, slower=100)
    assert timeline.bubble(events) == pytest.approx(1 - 11 * 8 / (2 * (6 * 8 + 5)))


def test_waiting_and_sending_are_idle_and_do_not_lengthen_the_span():
    work = [Event(0, "forward", 0, 10, 20), Event(1, "forward", 0, 20, 30)]
    extra = [Event(1, "wait", None, 0, 20), Event(0, "send", None, 20, 22), Event(0, "wait", None, 22, 99)]
    assert timeline.span(work + extra) == (10, 30)
    assert timeline.bubble(work + extra) == timeline.bubble(work) == 0.5
    assert timeline.idle(work + extra, 0) == [(20, 30)] and timeline.idle(work, 1) == [(10, 20)]


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_the_idle_intervals_are_the_bubble(stages, microbatches):
    events = played(stages, microbatches)
    first, last = timeline.span(events)
    gaps = sum(end - start for rank in range(stages) for start, end in timeline.idle(events, rank))
    assert gaps / (stages * (last - first)) == pytest.approx(timeline.bubble(events))


def test_a_trace_has_a_process_for_each_timeline_and_a_thread_for_each_rank():
    events = [e._replace(start=e.start + 5_000, end=e.end + 5_000) for e in played(2, 2)]
    trace = timeline.chrome_trace({"torch": events, "jax": [Event(1, "communication", None, 7, 9, "psum.3")]})
    assert json.loads(json.dumps(trace)) == trace
    records = trace["traceEvents"]
    named = {(r["pid"], r.get("tid")): r["args"]["name"] for r in records if r["ph"] == "M" and "name" in r["args"]}
    assert named == {(0, None): "torch", (0, 0): "rank 0", (0, 1): "rank 1", (1, None): "jax", (1, 1): "rank 1"}
    timed = [r for r in records if r["ph"] == "X"]
    assert len(timed) == 2 * 4 + 1
    assert timed[0] | {"args": {"microbatch": 0}} == timed[0]
    assert timed[0]["name"] == "F0" and timed[0]["ts"] == 0 and timed[0]["dur"] == 0.1
    assert timed[-1]["name"] == "psum.3" and timed[-1]["cat"] == "communication" and timed[-1]["dur"] == 0.002


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_replayed_has_the_bubble_that_was_counted(name):
    schedule = make(name, 2, 4)
    chunks = schedule.chunks
    of = {"forward": 100, "backward": 200, "backward_input": 100, "backward_weight": 100}
    taken = {action: of[action.kind] // chunks for stage in range(2) for action in actions(schedule, stage)}
    events = timeline.replay(schedule, taken)
    assert timeline.bubble(events) == pytest.approx(float(bubble_fraction(schedule)))
    assert {timeline.label(event) for event in events} == {str(action) for action in taken}


def row(microbatches, seconds, stages=2):
    run = Run("shard_map", one_axis("pipeline_parallel", stages), Problem(32, 16, 4), microbatches=microbatches)
    return bubbles.jax_row(run, [([seconds], [seconds * 3 / 4], [], 7), ([seconds], [seconds / 4], [], 9)])[0]


def test_a_fit_finds_the_work_and_what_a_tick_costs():
    rows = [row(m, 0.6 * (m + 1) / m + 0.01 * (m + 1)) for m in (1, 2, 4, 8, 16)]
    [fit] = bubbles.fits(rows)
    assert fit["work_seconds"] == pytest.approx(0.6) and fit["tick_seconds"] == pytest.approx(0.01)
    assert fit["worst_residual"] < 1e-9
    assert bubbles.fits(rows[:2]) == []


def test_what_is_lost_in_jax_is_what_the_useful_part_does_not_take():
    assert row(4, 1.0)["measured"]["median"] == 0.25
    assert row(4, 1.0)["of_theory"] == pytest.approx(1.25)
    assert row(4, 1.0)["temporaries"] == 9


def test_more_stages_than_cores_are_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(bubbles.machine, "cores", lambda: 2)
    made = plan([2, 4], [1, 2], ["shard_map"], SMALL, device="cpu")
    assert {run.world_size for run in made.runs} == {2}
    assert made.skipped == ((4, "4 stages of shard_map on 2 cores would wait for each other"),)
    with pytest.raises(ValueError, match="4 stages of shard_map on 2 cores .* at most 2 stages"):
        plan([4], [1], ["shard_map"], SMALL, device="cpu")


def test_more_stages_than_cores_are_paced_in_torch_on_a_smaller_problem(monkeypatch):
    monkeypatch.setattr(bubbles.machine, "cores", lambda: 2)
    made = plan([2, 4], [8], ["torch", "annotated"], Problem(512, 128, 8), device="cpu", paced_seconds=0.25)
    assert {(r.implementation, r.world_size, r.schedule) for r in made.runs} == {
        *(("torch", p, name) for p in (2, 4) for name in SCHEDULES), ("annotated", 2, "gpipe"),
    }  # fmt: skip
    of_four = next(run for run in made.runs if run.world_size == 4)
    assert (of_four.problem.batch, of_four.problem.width) == (64, 16)
    assert made.pace(of_four) == 2 * 8 * 16 * 16 * 2 / 0.25  # two layers of 8 rows
    assert made.pace(made.runs[0]) is None
    paced = plan([2], [8], ["torch"], SMALL, device="cpu", paced=True)
    assert all(paced.pace(run) for run in paced.runs)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--stages", "1"], "at least 2 stages"),
        (["--microbatches", "0"], "microbatches must be at least 1, got 0"),
        (["--implementation", "peer"], "unknown implementation 'peer'"),
        (["--layers", "1"], "needs at least 2 layers, got 1"),
        (["--iterations", "0"], "iterations must be at least 1, got 0"),
        (["--schedule", "1f2b"], "unknown schedule '1f2b'; known: naive"),
        (["--schedule", "interleaved", "--microbatches", "3"], "that its 2 stages divide, got 3"),
        (["--paced-seconds", "0"], "paced-seconds must be a number of seconds above 0"),
        (["--trace", "no/such/folder/a.json"], "the trace must be a .json file"),
    ],
)
def test_wrong_input_is_refused_in_a_line_before_anything_starts(arguments, reason, capsys, monkeypatch):
    from benchmarks.commands import bench

    monkeypatch.setattr(bubbles.machine, "cores", lambda: 2)
    with pytest.raises(SystemExit) as ended:
        bench(["bubbles", *arguments])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert reason in told and told.count("\n") == 1


def record_and_compare(device, run):
    """This rank's recorded timeline, and whether the results are the same as without the recorder."""
    import torch

    from benchmarks.bubbles import torch as bubbles_torch
    from torch_impl import train
    from torch_impl.compose import loss_and_grads
    from torch_impl.mesh import make_mesh

    mesh, events = make_mesh(run, device), []
    params, batch = train.make_params(mesh, run, device), train.make_batch(mesh, run, 0, device)
    want_loss, want = loss_and_grads(params, batch, mesh, run)
    watched = {"observe": bubbles_torch.observer(events, device), "input_grad": True}
    loss, grads = loss_and_grads(params, batch, mesh, run, **watched)
    same = [torch.equal(a, b) for x, y in zip(grads, want, strict=True) for a, b in zip(x, y, strict=True)]
    return events, all(same) and torch.equal(loss, want_loss)


@pytest.mark.parametrize(("schedule", "microbatches"), [("gpipe", 1), ("zb_v", 3)])
def test_the_recorder_sees_the_schedule_and_changes_nothing(pool, schedule, microbatches):
    run = Run("torch", one_axis("pipeline_parallel", 2), SMALL, microbatches=microbatches, schedule=schedule)
    for rank, (events, same) in enumerate(pool.call(record_and_compare, run, world_size=2)):
        assert same
        acted = [Action(e.kind, rank, e.chunk, e.microbatch) for e in events if e.kind in timeline.BUSY]
        assert acted == actions(make(schedule, 2, microbatches), rank)
        assert {e.kind for e in events} == {"send", "wait", *(action.kind for action in acted)}
        assert all(a.end <= b.start for a, b in zip(events, events[1:], strict=False)), "one thing at a time"


@pytest.mark.parametrize(
    ("name", "places", "ordered", "least"),
    [  # (stages, microbatches), those where all schedules differ, and the least that a bubble may be of its closed form
        ("2026-12-01_schedules_real", {(2, 4)}, {(2, 4)}, 0.9),
        ("2026-11-30_schedules_paced", {(4, 8)}, {(4, 8)}, 1),
        ("2026-11-30_schedules_paced_all", {(2, 4), (2, 8), (4, 4), (4, 8)}, {(2, 4), (2, 8), (4, 8)}, 1),
    ],
)
def test_the_measured_schedules_are_in_the_order_of_their_bubbles_and_keep_what_the_closed_form_says(
    name, places, ordered, least
):
    measured = Path(bubbles.__file__).parents[1] / "results" / f"{name}_2_cores.json"
    result = parse_as(Bubbles, json.loads(measured.read_text(encoding="utf-8")))
    assert {(row.stages, row.microbatches) for row in result.rows} == places
    for p, m in ordered:
        naive, gp, one, inter, h1, v = (
            next(r for r in result.rows if (r.order, r.stages, r.microbatches) == (name, p, m)) for name in SCHEDULES
        )
        got = [row.measured.median for row in (naive, gp, inter, h1, v)]
        off = 0.01 if one.paced else 0.02
        assert got == sorted(got, reverse=True) and one.measured.median == pytest.approx(gp.measured.median, rel=off)
        assert one.kept and gp.kept and one.kept[0] * m == gp.kept[0] * p, "p microbatches and not m"
    for row in result.rows:
        most = 1.15 if row.paced and row.theory < 0.03 else 1.1
        assert row.kept == row.kept_theory and least <= row.of_theory < most


def test_one_run_of_everything_and_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(bubbles.machine, "cores", lambda: 2)
    how = {"iterations": 2, "device": "cpu", "timeout": 100, "paced_seconds": 0.01}
    made = plan([2, 3], [4, 1, 2], ["torch", "shard_map"], SMALL, schedules=["gpipe"], **how)
    kept = [run for run in made.runs if run.implementation == "torch" or run.microbatches == 1]  # others take long
    kept = [run for run in kept if run.world_size == 2 or run.microbatches == 2]
    assert kept[-1].world_size == 3, "paced"
    made, saved = replace(made, runs=tuple(kept)), []
    document = bubbles.measure(made, lambda so_far: saved.append(json.dumps(so_far, allow_nan=False)))
    assert json.loads(json.dumps(document)) == json.loads(saved[-1]) and document["complete"]
    assert [len(json.loads(each)["rows"]) for each in saved] == [1, 2, 3, 4, 5, 5]
    assert [(row["microbatches"], row["implementation"]) for row in document["rows"]][:3] == [
        (1, "torch"), (1, "shard_map"), (2, "torch"),
    ]  # fmt: skip
    for row in document["rows"]:
        assert 0 < row["measured"]["median"] < 1 or row["framework"] == "jax"
        assert (row["weighted"] is None) == (row["framework"] == "jax")
        assert row["kept"] == row["kept_theory"] and (row["temporaries"] is None) == (row["framework"] == "torch")
        assert (row["paced"] is not None) == (row["stages"] == 3)
    paced = document["rows"][-1]
    assert paced["measured"]["median"] > 0.9 * paced["theory"], "what others do on the machine only adds to it"
    assert [fit["implementation"] for fit in document["fits"]] == ["torch"], "three or more numbers of microbatches"
    for one in document["timelines"]:
        assert {event[0] for event in one["events"]} == set(range(one["stages"])), "all ranks"

    result = parse_as(Bubbles, json.loads(saved[-1]))
    trace = timeline.chrome_trace(view.titled(result))
    assert {r["cat"] for r in trace["traceEvents"] if r["ph"] == "X"} >= {"forward", "backward", "wait", "send"}
    picture.picture(result, tmp_path / "bubbles.png")
    assert (tmp_path / "bubbles.png").stat().st_size > 10_000
    assert "3 stages of shard_map on 2 cores would wait for each other: not measured" in view.parts(result)
    assert len(view.table(result).rows) == 5
