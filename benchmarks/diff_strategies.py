"""The diff of a strategy: what a real run communicates, what a compiler derives, and what the closed form says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from benchmarks.problems import sizes_of, with_experts
from contract import cost
from contract.axes import ON_AXES, one_axis, parse_axes
from contract.problem import Problem
from contract.strategy import Run
from contract.transformer import Transformer
from shardiff.cli.answers import one_of
from shardiff.diff import Diff, diff
from shardiff.program import Program
from shardiff.ranks.silence import watched
from shardiff.record import Record, totals

MOST_TRACED = 16  # ranks that a laptop can run; for more, what is written is told by its closed form


@dataclass(frozen=True)
class StrategyDiff:
    """One strategy on one target.

    diff: what is written on the left, what is derived on the right. traced: whether what is written was traced in a run
    of as many ranks; else it is the closed form. work: what one device does beside communicating
    (`shardiff.hlo.work.Work`).
    """

    run: Run
    target: str
    diff: Diff
    traced: bool
    closed_form: list[Record]
    work: dict[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        own_formula = cost.communication(self.run)
        closed_form = {"records": [record.to_json() for record in self.closed_form], "totals": totals(self.closed_form)}
        document = self.diff.to_json()
        document["left"]["traced"] = self.traced
        document["right"]["work"] = self.work
        problem = {"problem": sizes_of(self.run)} if isinstance(self.run.problem, Transformer) else {}
        return {
            "schema": document.pop("schema"),
            "strategy": self.run.strategy,
            "implementation": self.run.implementation,
            "target": self.target,
            "mesh": dict(self.run.mesh.axes),
            **problem,
            **document,
            "closed_form": {**closed_form, "implementation_totals": totals(own_formula)},
        }


def compare(
    run: Run,
    target: str,
    written: Sequence[Record],
    derived: Sequence[Record],
    traced: bool = True,
    memory: dict[str, int] | None = None,
    work: dict[str, int] | None = None,
) -> StrategyDiff:
    """The diff of what is written with what is derived, with the closed form beside it."""
    mesh = run.mesh
    sides = Program(tuple(written), "written", mesh), Program(tuple(derived), "derived", mesh, memory or {})
    closed_form = cost.communication(run.in_torch)
    return StrategyDiff(run, target, diff(*sides), traced, closed_form, work)


def compute(
    runs: Sequence[tuple[Run, Any]],
    precision: str = "default",
    progress: Callable[[str], None] = lambda _: None,
    timeout: float = 30,
) -> list[StrategyDiff]:
    """The diffs of these (run, target) pairs, in their order. Compiles while it traces.

    timeout: seconds of silence after which a rank, or the compiler, is stuck.

    Raises ValueError for what cannot be compiled, WorkerError if a rank of a traced run fails.
    """
    from jax_impl import compiled as targets
    from shardiff import hlo
    from shardiff.hlo.work import work

    explicit_runs = list(dict.fromkeys(run.in_torch for run, _ in runs))
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(
            trace_all, [run for run in explicit_runs if run.world_size <= MOST_TRACED], progress, timeout
        )
        progress(f"compiling for {', '.join(dict.fromkeys(str(target) for _, target in runs))}")
        with watched("the compiler", timeout):
            compiled = targets.compile_all(runs, precision)
        traced = pending.result()
    diffs = []
    for (run, target), result in zip(runs, compiled, strict=True):
        written = run.in_torch
        records = traced.get(written) or cost.communication(written)
        derived, memory = hlo.read(result.hlo).records, asdict(result.memory)
        told = written in traced, memory, asdict(work(result.hlo))
        diffs.append(compare(run, str(target), records, derived, *told))
    return diffs


def written(run: Run, timeout: float = 30) -> Program:
    """What the torch implementation of a run communicates: traced, or beyond MOST_TRACED ranks its closed form."""
    run = run.in_torch
    if run.world_size <= MOST_TRACED:
        records = trace_all([run], lambda _: None, timeout)[run]
    else:
        records = cost.communication(run)
    return Program(tuple(records), f"{run.strategy} on {run.world_size} ranks", run.mesh)


def trace_all(runs: Sequence[Run], progress: Callable[[str], None], timeout: float = 30) -> dict[Run, list[Record]]:
    """What each explicit run communicates in one step, traced in real processes."""
    from shardiff.ranks.torch_pool import workers
    from torch_impl.traced import trace_run

    if not runs:
        return {}
    records = {}
    with workers(max(run.world_size for run in runs), "cpu", timeout) as pool:
        for run in runs:
            progress(f"tracing {run.strategy} on {run.world_size} ranks")
            records[run] = trace_run(replace(run, device="cpu"), pool)
    return records


def plan(
    strategies: Sequence[str],
    implementation: str,
    degree: int | None,
    mesh: str | None,
    targets: Sequence[str],
    problem: Problem,
    **rest: Any,
) -> list[tuple[Run, Any]]:
    """The (run, target) pairs that the options ask for; `rest` goes to all runs.

    Raises ValueError, one line, for what cannot work.
    """
    from shardiff.compiling.hardware import parse

    if implementation not in ("annotated", "shard_map"):
        raise ValueError(f"unknown implementation {implementation!r} to diff torch with; known: annotated, shard_map")
    for strategy in strategies:
        one_of("strategy", strategy, ON_AXES)
    if degree is not None and degree < 1:
        raise ValueError(f"degree must be at least 1, got {degree}")
    axes = None
    if mesh is not None:
        axes = parse_axes(mesh, tuple(strategies))
        ranks = prod(axis.size for axis in axes)
        if degree not in (None, ranks):
            raise ValueError(f"mesh {mesh} and degree {degree} do not agree; give one of them")
        degree = ranks
    pairs = []
    for strategy, text in itertools.product(strategies if axes is None else [""], targets or [f"cpu:{degree or 4}"]):
        target = parse(text)
        ranks = degree or target.num_devices
        if ranks > target.num_devices:
            raise ValueError(f"degree {ranks} needs {ranks} devices, {target} has {target.num_devices}")
        chosen = axes or one_axis(strategy, ranks)
        split = with_experts(problem, [axis.strategy for axis in chosen])
        run = Run(implementation, chosen, split, **rest)
        pairs.append((run, target))
    return pairs
