"""The bubble of a pipeline in every schedule, measured: `shardiff bench bubbles`.

torch: per-rank timelines of the actions. The measured bubble is idle stage-time over total stage-time between the first
start of an action and the last end, over all stages. Beside it stand the closed form (`contract.schedule_time`, for F =
B = W, as each is one product a layer) and the schedule's own bubble replayed with the measured durations. More stages
than cores run on paced devices, on a smaller problem, and the document says at which rate.
JAX: a compiled program has no actions to watch; see `benchmarks.bubbles.jax`. Its number includes communication.

The document, plain JSON; seconds; a spread is {"median", "q1", "q3"}:

    kind "bubbles", schema 1, complete, machine, method, settings, skipped [{stages, reason}]
    runs       date, blocks: what was measured in which run, where an interrupted one was resumed
    rows       framework, implementation, schedule, stages, microbatches, theory, measured (spread), weighted (spread;
               null for JAX), of_theory (that of measured), step_seconds (spread), kept, kept_theory (bytes of
               activations on each stage), temporaries (bytes), paced (operations per second, or null), repeated
    fits       implementation, stages: step = work_seconds (m + p - 1) / m + tick_seconds (m + p - 1) over all m of
               GPipe's order, and its largest error, worst_residual, as a share of the step
    timelines  framework, implementation, schedule, stages, microbatches, events [[rank, kind, microbatch, start, end,
               name, chunk], ...] in nanoseconds: torch's fastest iteration, the least disturbed; a profiled step of JAX
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.bubbles import timeline
from benchmarks.bubbles.plan import Plan
from benchmarks.documents import resume
from benchmarks.documents.figures import adjacent_ratios, over_ranks, spread
from benchmarks.pools import workers
from benchmarks.problems import sizes_of
from contract.layout import schedule_of
from contract.memory import memory
from contract.schedule import make
from contract.schedule_time import bubble_fraction, closed_form
from contract.strategy import Run
from shardiff.system import machine

IMPLEMENTATIONS = ("torch", "shard_map", "annotated")
METHOD = {
    "torch": "idle over total stage-time from the first action's start to the last one's end, all stages; actions are "
    "recorded around the calls of the strategy, one clock for all processes; the first part of the model computes the "
    "gradient of its input as the others do",
    "paced": "more stages than cores: the CPU computes the values, and products take the time of a device of the rate "
    "given with the row; a sample in which the CPU was late by more than 2 % is repeated",
    "kept": "the most bytes that autograd and gradients put off hold at any time of a step; closed form: "
    "contract.memory",
    "weighted": "the same of the schedule replayed with the measured duration of every action and free communication",
    "jax": "1 - useful / whole, adjacent iterations: whole is forward and backward pass on all stages, useful a "
    "stage's own layers on all microbatches, a program of one device that all ranks run at once. What is lost is "
    "bubble and communication",
}


def begin(plan: Plan) -> dict[str, Any]:
    """The document before anything is measured."""
    return {
        "kind": "bubbles",
        "schema": 1,
        "complete": False,
        "machine": machine.facts(),
        "method": METHOD,
        "settings": {
            **sizes_of(plan.runs[0]),
            "iterations": plan.iterations,
            "device": plan.device,
            "paced_seconds": plan.paced_seconds,
            "blocks": [block(run) for run in plan.runs],
        },
        "skipped": [{"stages": stages, "reason": reason} for stages, reason in plan.skipped],
        "runs": [],
        "rows": [],
        "fits": [],
        "timelines": [],
    }


def block(run: Run) -> str:
    """What is measured at once."""
    return f"{run.implementation}: {run.schedule}, {run.world_size} stages, {run.microbatches} microbatches"


def measure(
    plan: Plan,
    save: Callable[[dict[str, Any]], object] = lambda document: None,
    starting: Callable[[str], object] = lambda what: None,
    kept: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The document. save: called with it whenever it has grown; kept: an interrupted run's document, whose blocks are
    not measured again. Raises WorkerError of either launcher."""
    document = begin(plan)
    resume.begin(document, kept)
    keys = ("framework", "implementation", "schedule", "stages", "microbatches")
    for degree in dict.fromkeys(run.world_size for run in plan.runs):
        runs = [run for run in plan.runs if run.world_size == degree]
        with ExitStack() as stack:
            call = pools(plan, [run for run in runs if not resume.has(kept, block(run))], stack)
            for run in runs:
                if kept and resume.has(kept, block(run)):
                    of = run.implementation, run.schedule, run.world_size, run.microbatches
                    for key in ("rows", "timelines"):
                        document[key] += [one for one in kept[key] if tuple(one[key] for key in keys[1:]) == of]
                    continue
                starting(block(run))
                if run.implementation == "torch":
                    pace = plan.pace(run)
                    row, events = torch_row(run, call[True](run, plan.iterations, pace), pace)
                else:
                    row, events = jax_row(run, call[False](run, plan.iterations))
                document["rows"].append(row)
                document["timelines"].append({**{key: row[key] for key in keys}, "events": timeline.from_zero(events)})
                document["fits"] = fits(document["rows"])
                resume.measured(document, block(run))
                save(document)
    document["fits"] = fits(document["rows"])
    document["complete"] = True
    save(document)
    return document


def pools(plan: Plan, runs: Sequence[Run], stack: ExitStack) -> dict[bool, Callable[..., list[Any]]]:
    """Whether torch -> what runs a measurement on all ranks of that framework, whose processes end with `stack`."""
    calls: dict[bool, Callable[..., list[Any]]] = {}
    if any(run.implementation == "torch" for run in runs):
        in_torch = stack.enter_context(workers("torch", runs[0].world_size, plan.device, plan.timeout))
        calls[True] = lambda *args: in_torch.call(on_torch, *args)
    if any(run.implementation != "torch" for run in runs):
        in_jax = stack.enter_context(workers("jax", runs[0].world_size, plan.device, plan.timeout))
        calls[False] = lambda *args: in_jax.call(on_jax, *args)
    return calls


def on_torch(device: Any, run: Run, iterations: int, pace: float | None) -> Any:
    """On a rank, which imports its own framework only."""
    from benchmarks.bubbles import torch as bubbles_torch

    return bubbles_torch.record(device, run, iterations, pace)


def on_jax(run: Run, iterations: int) -> Any:
    """On a rank, which imports its own framework only."""
    from benchmarks.bubbles import jax as bubbles_jax

    return bubbles_jax.measure(run, iterations)


Timeline = list[timeline.Event]


def torch_row(
    run: Run, by_rank: Sequence[tuple[Sequence[Timeline], int, int]], pace: float | None = None
) -> tuple[dict[str, Any], Timeline]:
    """The row of a run and the events of its fastest iteration, from every rank's (timelines, bytes kept, repeats)."""
    merged: list[Timeline] = [sum(each, []) for each in zip(*(rank[0] for rank in by_rank), strict=True)]
    schedule = schedule_of(run)
    assert schedule is not None
    measured = [timeline.bubble(events) for events in merged]
    weighted = [timeline.bubble(timeline.replay(schedule, timeline.durations(events))) for events in merged]
    spans = [timeline.span(events) for events in merged]
    seconds = [(end - start) / 1e9 for start, end in spans]
    row = _row(run, "torch", measured, seconds) | {
        "weighted": spread(weighted),
        "kept": [rank[1] for rank in by_rank],
        "kept_theory": [each.activations for each in memory(run)],
        "paced": pace,
        "repeated": by_rank[0][2],
    }
    return row, merged[seconds.index(min(seconds))]


def jax_row(
    run: Run, by_rank: Sequence[tuple[list[float], list[float], Timeline, int]]
) -> tuple[dict[str, Any], Timeline]:
    """The row of a run and its profiled step, from every rank's (whole, useful, events, bytes of temporaries)."""
    whole, useful = over_ranks([rank[0] for rank in by_rank]), over_ranks([rank[1] for rank in by_rank])
    measured = [1 - ratio for ratio in adjacent_ratios(useful, whole)]
    row = _row(run, "jax", measured, whole) | {"temporaries": max(rank[3] for rank in by_rank)}
    return row, sum((rank[2] for rank in by_rank), [])


def _row(run: Run, framework: str, measured: list[float], seconds: list[float]) -> dict[str, Any]:
    of = run.schedule, run.world_size, run.microbatches, run.chunks
    formula = closed_form(*of)
    theory = float(bubble_fraction(make(*of)) if formula is None else formula)
    return {
        "framework": framework,
        "implementation": run.implementation,
        "schedule": run.schedule,
        "stages": run.world_size,
        "microbatches": run.microbatches,
        "theory": theory,
        "measured": spread(measured),
        "weighted": None,
        "of_theory": statistics.median(measured) / theory,
        "step_seconds": spread(seconds),
        "kept": None,
        "kept_theory": None,
        "temporaries": None,
        "paced": None,
        "repeated": 0,
    }


def fits(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Step times in GPipe's order against the number of ticks, for each implementation and number of stages with three
    numbers of microbatches or more.

    A tick takes work / m and what a tick costs whatever its size, t; a step has m + p - 1 of them. Least squares of
    the relative error.
    """
    result = []
    rows = [row for row in rows if row["schedule"] == "gpipe"]
    for key in dict.fromkeys((row["implementation"], row["stages"]) for row in rows):
        mine = [row for row in rows if (row["implementation"], row["stages"]) == key]
        if len(mine) < 3:
            continue
        m = np.array([row["microbatches"] for row in mine], float)
        seconds = np.array([row["step_seconds"]["median"] for row in mine])
        ticks = m + key[1] - 1
        terms = np.stack([ticks / m, ticks], axis=1) / seconds[:, None]
        (work, tick), *_ = np.linalg.lstsq(terms, np.ones(len(m)))
        worst = float(np.abs(terms @ [work, tick] - 1).max())
        named = {"implementation": key[0], "stages": key[1]}
        result.append({**named, "work_seconds": work, "tick_seconds": tick, "worst_residual": worst})
    return [{k: float(v) if isinstance(v, np.floating) else v for k, v in fit.items()} for fit in result]
