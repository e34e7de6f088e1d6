"""The bubble of a pipeline, measured: `shardiff bench bubbles`.

torch: per-rank timelines of the actions. The measured bubble is idle stage-time over total stage-time between the first
start of an action and the last end, over all stages. Beside it stand the closed form (p - 1) / (m + p - 1) and the
schedule's own bubble weighted by the measured durations: a backward pass takes about twice as long as a forward pass,
which the closed form need not know as long as all stages are alike.
JAX: a compiled program has no actions to watch; see `benchmarks.bubbles.jax`. Its number includes communication.

The document, plain JSON; seconds; a spread is {"median", "q1", "q3"}:

    kind "bubbles", schema 1, complete, machine, method, settings, skipped [{stages, reason}]
    runs       date, blocks: what was measured in which run, where an interrupted one was resumed
    rows       framework, implementation, schedule ("naive", which is one microbatch, or "gpipe"), stages,
               microbatches, theory, measured (spread), weighted (spread; null for JAX), of_theory (that of measured),
               step_seconds (spread)
    fits       implementation, stages: step = work_seconds (m + p - 1) / m + tick_seconds (m + p - 1) over all m, and
               its largest error, worst_residual, as a share of the step
    timelines  framework, implementation, stages, microbatches, events [[rank, kind, microbatch, start, end, name], ...]
               in nanoseconds: torch's fastest iteration, the least disturbed; one profiled step of JAX
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.bubbles import timeline
from benchmarks.documents import resume
from benchmarks.documents.figures import adjacent_ratios, over_ranks, spread
from benchmarks.pools import workers
from contract.problem import Problem
from contract.schedule import gpipe, gpipe_bubble_fraction
from contract.strategy import Run, one_axis
from shardiff.system import machine

IMPLEMENTATIONS = ("torch", "shard_map", "annotated")
METHOD = {
    "torch": "idle over total stage-time from the first action's start to the last one's end, all stages; actions are "
    "recorded around the calls of the strategy, one clock for all processes; the first stage computes the gradient of "
    "its input as the others do",
    "weighted": "the same of the schedule replayed with the measured duration of every action and free communication",
    "jax": "1 - useful / whole, adjacent iterations: whole is forward and backward pass on all stages, useful a "
    "stage's own layers on all microbatches, a program of one device that all ranks run at once. What is lost is "
    "bubble and communication",
}


@dataclass(frozen=True)
class Plan:
    """runs: one for each implementation, number of stages and of microbatches. skipped: too many stages, and why."""

    runs: tuple[Run, ...]
    skipped: tuple[tuple[int, str], ...]
    iterations: int
    device: str
    timeout: float


def plan(
    stages: Sequence[int],
    microbatches: Sequence[int],
    implementations: Sequence[str],
    problem: Problem,
    iterations: int = 6,
    device: str = "auto",
    timeout: float = 300,
) -> Plan:
    """Raises ValueError for what cannot be run, and if nothing can be measured honestly: stages that share a core take
    turns on it, so that their idle time is no bubble."""
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout}")
    runs = [
        Run(i, one_axis("pipeline_parallel", p), problem, microbatches=m, device=device)
        for p in stages
        for m in sorted(set(microbatches))
        for i in implementations
    ]
    if 1 in stages:
        raise ValueError("a pipeline needs at least 2 stages to have a bubble, got 1")
    gpus = machine.num_gpus() if device != "cpu" else 0
    on_gpus = device == "cuda" or gpus >= max(stages)
    have, what = (gpus, "GPUs") if on_gpus else (machine.cores(), "cores")
    skipped = tuple((p, f"{p} stages on {have} {what} would wait for each other") for p in stages if p > have)
    kept = tuple(run for run in runs if run.world_size <= have)
    if not kept:
        raise ValueError(f"{skipped[0][1]}, which is no bubble; at most {have} stages can be measured here")
    return Plan(kept, skipped, iterations, "cuda" if on_gpus else "cpu", timeout)


def begin(plan: Plan) -> dict[str, Any]:
    """The document before anything is measured."""
    return {
        "kind": "bubbles",
        "schema": 1,
        "complete": False,
        "machine": machine.facts(),
        "method": METHOD,
        "settings": {
            **asdict(plan.runs[0].problem),
            "iterations": plan.iterations,
            "device": plan.device,
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
    return f"{run.implementation}: {run.world_size} stages, {run.microbatches} microbatches"


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
    keys = ("framework", "implementation", "stages", "microbatches")
    for degree in dict.fromkeys(run.world_size for run in plan.runs):
        runs = [run for run in plan.runs if run.world_size == degree]
        with ExitStack() as stack:
            call = pools(plan, [run for run in runs if not resume.has(kept, block(run))], stack)
            for run in runs:
                if kept and resume.has(kept, block(run)):
                    of = run.implementation, run.world_size, run.microbatches
                    for key in ("rows", "timelines"):
                        document[key] += [one for one in kept[key] if tuple(one[key] for key in keys[1:]) == of]
                    continue
                starting(block(run))
                by_rank = call[run.implementation == "torch"](run, plan.iterations)
                row, events = (torch_row if run.implementation == "torch" else jax_row)(run, by_rank)
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


def on_torch(device: Any, run: Run, iterations: int) -> Any:
    """On a rank, which imports its own framework only."""
    from benchmarks.bubbles import torch as bubbles_torch

    return bubbles_torch.record(device, run, iterations)


def on_jax(run: Run, iterations: int) -> Any:
    """On a rank, which imports its own framework only."""
    from benchmarks.bubbles import jax as bubbles_jax

    return bubbles_jax.measure(run, iterations)


Timeline = list[timeline.Event]


def torch_row(run: Run, by_rank: Sequence[Sequence[Timeline]]) -> tuple[dict[str, Any], Timeline]:
    """The row of a run and the events of its fastest iteration, from by_rank[rank][iteration]."""
    merged: list[Timeline] = [sum(each, []) for each in zip(*by_rank, strict=True)]
    schedule = gpipe(run.world_size, run.microbatches)
    measured = [timeline.bubble(events) for events in merged]
    weighted = [timeline.bubble(timeline.replay(schedule, timeline.durations(events))) for events in merged]
    spans = [timeline.span(events) for events in merged]
    seconds = [(end - start) / 1e9 for start, end in spans]
    return _row(run, "torch", measured, seconds) | {"weighted": spread(weighted)}, merged[seconds.index(min(seconds))]


def jax_row(run: Run, by_rank: Sequence[tuple[list[float], list[float], Timeline]]) -> tuple[dict[str, Any], Timeline]:
    """The row of a run and its profiled step, from every rank's (whole, useful, events)."""
    whole, useful = over_ranks([rank[0] for rank in by_rank]), over_ranks([rank[1] for rank in by_rank])
    measured = [1 - ratio for ratio in adjacent_ratios(useful, whole)]
    return _row(run, "jax", measured, whole), sum((rank[2] for rank in by_rank), [])


def _row(run: Run, framework: str, measured: list[float], seconds: list[float]) -> dict[str, Any]:
    theory = float(gpipe_bubble_fraction(run.world_size, run.microbatches))
    return {
        "framework": framework,
        "implementation": run.implementation,
        "schedule": "naive" if run.microbatches == 1 else "gpipe",
        "stages": run.world_size,
        "microbatches": run.microbatches,
        "theory": theory,
        "measured": spread(measured),
        "weighted": None,
        "of_theory": statistics.median(measured) / theory,
        "step_seconds": spread(seconds),
    }


def fits(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Step times against the number of ticks, for each implementation and number of stages with three m or more.

    A tick takes work / m and what a tick costs whatever its size, t; a step has m + p - 1 of them. Least squares of
    the relative error.
    """
    result = []
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
