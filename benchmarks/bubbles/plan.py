"""What `shardiff bench bubbles` measures, and on which devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.flops import products_of_forward
from contract.axes import one_axis
from contract.problem import Problem
from contract.schedule import SCHEDULES, num_chunks, unfit
from contract.strategy import Run
from contract.transformer import Transformer
from shardiff.system import machine

PACED_SECONDS = 0.4  # a hundred times what the host needs from one pass to the next
SMALLER = 8  # by which batch and width of a paced run are divided, so that the CPU keeps up


@dataclass(frozen=True)
class Plan:
    """runs: one for each implementation, number of stages and of microbatches. skipped: too many stages, and why."""

    runs: tuple[Run, ...]
    skipped: tuple[tuple[int, str], ...]
    iterations: int
    device: str
    timeout: float
    on_their_own: int
    paced_seconds: float

    def pace(self, run: Run) -> float | None:
        """Operations per second of a paced device, on which a microbatch's forward pass through a stage takes
        `paced_seconds`; None where every stage has a core or a GPU of its own."""
        if run.world_size <= self.on_their_own:
            return None
        return products_of_forward(run.problem) / run.microbatches / run.world_size / self.paced_seconds


def plan(
    stages: Sequence[int],
    microbatches: Sequence[int],
    implementations: Sequence[str],
    problem: Problem,
    iterations: int = 6,
    device: str = "auto",
    timeout: float = 300,
    schedules: Sequence[str] = (),
    chunks: int = 2,
    paced: bool = False,
    paced_seconds: float = PACED_SECONDS,
) -> Plan:
    """Raises ValueError for what cannot be run, and if nothing can be measured honestly: stages that share a core take
    turns on it, so that their idle time is no bubble. On the CPU torch's are paced, JAX's cannot be.

    Without schedules: all that there are for a number of stages and microbatches. paced: pace torch's in any case.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    for name, value in (("timeout", timeout), ("paced-seconds", paced_seconds)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a number of seconds above 0, got {value}")
    if 1 in stages:
        raise ValueError("a pipeline needs at least 2 stages to have a bubble, got 1")
    gpus = machine.num_gpus() if device != "cpu" else 0
    on_gpus = device == "cuda" or gpus >= max(stages)
    have, what = (gpus, "GPUs") if on_gpus else (machine.cores(), "cores")
    alone = 0 if paced and not on_gpus else have  # so many stages are timed as they are
    kept, skipped = [], []
    for p, m, name in product(stages, sorted(set(microbatches)), schedules or SCHEDULES):
        too_few = p <= problem.layers < p * num_chunks(name, chunks)
        if not schedules and m >= 1 and (too_few or unfit(name, p, m, chunks)):
            continue
        small = smaller(problem, m)
        order: dict[str, Any] = {"microbatches": m, "schedule": name, "chunks": chunks, "device": device}
        for implementation in implementations:
            as_it_is = p <= alone or on_gpus or implementation != "torch"
            run = Run("torch", one_axis("pipeline_parallel", p), problem if as_it_is else small, **order)
            if implementation == "annotated" and not run.in_gpipes_order:
                continue
            run = replace(run, implementation=implementation)
            if p <= have or not as_it_is:
                kept.append(run)
            else:
                skipped.append((p, f"{p} stages of {implementation} on {have} {what} would wait for each other"))
    if not kept:
        raise ValueError(f"{skipped[0][1]}, which is no bubble; at most {have} stages can be measured here")
    once = tuple(dict.fromkeys(skipped))
    return Plan(tuple(kept), once, iterations, "cuda" if on_gpus else "cpu", timeout, alone, paced_seconds)


def smaller(problem: Problem, microbatches: int) -> Problem:
    """The problem of a paced run."""
    batch, width = max(problem.batch // SMALLER, microbatches), max(problem.width // SMALLER, 1)
    if not isinstance(problem, Transformer):
        return replace(problem, batch=batch, width=width)
    width = max(width // problem.heads, 1) * problem.heads
    return replace(problem, batch=batch, width=width, ff=max(problem.ff // SMALLER, 1))
