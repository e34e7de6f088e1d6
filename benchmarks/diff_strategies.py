"""What `shardiff diff` does: the three columns of a diff, from a real run, from a compiler, and from a formula."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from contract import cost
from contract.problem import Problem
from contract.strategy import AXES, STRATEGIES, Run
from shardiff.diff.files import fails, side
from shardiff.diff.rules import Row, align, unexplained
from shardiff.mesh import Mesh
from shardiff.ranks.watchdog import watched
from shardiff.record import Record, totals

MOST_TRACED = 16  # ranks that a laptop can run; for more, the explicit side is its closed form


@dataclass(frozen=True)
class Diff:
    """One strategy on one target. traced: whether `explicit` was traced in a run of as many ranks; else, the formula.

    memory: bytes of one device as the compiler planned them, by kind. work: what one device does beside communicating
    (`shardiff.hlo.work.Work`).
    """

    run: Run
    target: str
    explicit: list[Record]
    traced: bool
    derived: list[Record]
    closed_form: list[Record]
    memory: dict[str, int]
    rows: list[Row]
    work: dict[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        own_formula = cost.communication(self.run)
        return {
            "strategy": self.run.strategy,
            "implementation": self.run.implementation,
            "target": self.target,
            "mesh": {AXES[self.run.strategy] or "one": self.run.degree},
            "explicit": {**side(self.explicit), "traced": self.traced},
            "derived": {**side(self.derived), "memory": self.memory, "work": self.work},
            "closed_form": {**side(self.closed_form), "implementation_totals": totals(own_formula)},
            "rows": [row.to_json() for row in self.rows],
            "unexplained": unexplained(self.rows),
        }


def compute(
    runs: Sequence[tuple[Run, Any]],
    precision: str = "default",
    progress: Callable[[str], None] = lambda _: None,
    timeout: float = 30,
) -> list[Diff]:
    """The diffs of these (run, target) pairs, in their order. Compiles while it traces.

    timeout: seconds of silence after which a rank, or the compiler, is stuck.

    Raises ValueError for what cannot be compiled, WorkerError if a rank of a traced run fails.
    """
    from jax_impl import compiled as targets
    from shardiff import hlo
    from shardiff.hlo.work import work

    explicit_runs = list(dict.fromkeys(replace(run, implementation="torch") for run, _ in runs))
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(trace_all, [run for run in explicit_runs if run.degree <= MOST_TRACED], progress, timeout)
        progress(f"compiling for {', '.join(dict.fromkeys(str(target) for _, target in runs))}")
        with watched("the compiler", timeout):
            compiled = targets.compile_all(runs, precision)
        traced = pending.result()
    diffs = []
    for (run, target), result in zip(runs, compiled, strict=True):
        written = replace(run, implementation="torch")
        closed_form = cost.communication(written)
        explicit = traced.get(written, closed_form)
        axis = AXES[run.strategy]
        derived = Mesh(((axis, run.degree),) if axis else ()).named(hlo.read(result.hlo).records)
        diffs.append(
            Diff(
                run,
                str(target),
                explicit,
                written in traced,
                derived,
                closed_form,
                asdict(result.memory),
                align(explicit, derived),
                asdict(work(result.hlo)),
            )
        )
    return diffs


def trace_all(runs: Sequence[Run], progress: Callable[[str], None], timeout: float = 30) -> dict[Run, list[Record]]:
    """What each explicit run communicates in one step, traced in real processes."""
    from shardiff.ranks.torch_pool import workers
    from shardiff.ranks.torch_rank import no_new_cache

    with no_new_cache():
        from torch_impl.traced import trace_run

    if not runs:
        return {}
    records = {}
    with workers(max(run.degree for run in runs), "cpu", timeout) as pool:
        for run in runs:
            progress(f"tracing {run.strategy} on {run.degree} ranks")
            records[run] = trace_run(replace(run, device="cpu"), pool)
    return records


def plan(
    strategies: Sequence[str],
    implementation: str,
    degree: int | None,
    mesh: str | None,
    targets: Sequence[str],
    problem: Problem,
    microbatches: int,
) -> list[tuple[Run, Any]]:
    """The (run, target) pairs that the options ask for. Raises ValueError, one line, for what cannot work."""
    from shardiff.compiling.hardware import parse

    if implementation not in ("annotated", "shard_map"):
        raise ValueError(f"unknown implementation {implementation!r} to diff torch with; known: annotated, shard_map")
    for strategy in strategies:
        if strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {strategy!r}; known: {', '.join(STRATEGIES)}")
    if mesh is not None:
        axis, _, ranks = mesh.partition("=")
        for strategy in strategies:
            if axis != AXES[strategy] or not (ranks.isascii() and ranks.isdigit()):
                raise ValueError(f"the mesh of {strategy} has one axis: {AXES[strategy]}=N, got {mesh!r}")
        if degree not in (None, int(ranks)):
            raise ValueError(f"mesh {mesh} and degree {degree} do not agree; give one of them")
        degree = int(ranks)
    if degree is not None and degree < 1:
        raise ValueError(f"degree must be at least 1, got {degree}")
    pairs = []
    for strategy, text in itertools.product(strategies, targets or [f"cpu:{degree or 4}"]):
        target = parse(text)
        ranks = degree or target.num_devices
        if ranks > target.num_devices:
            raise ValueError(f"degree {ranks} needs {ranks} devices, {target} has {target.num_devices}")
        pairs.append((Run(implementation, strategy, ranks, problem, microbatches=microbatches), target))
    return pairs


def show(
    pairs: Sequence[tuple[Run, Any]],
    precision: str,
    fail_on: str | None,
    png: Path | None,
    as_json: bool,
    timeout: float = 30,
) -> int:
    """Compute and print the diffs, one JSON object a line or as tables; returns 1 for what `fail_on` names, else 0."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from benchmarks import diff_view

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("")
        diffs = compute(pairs, precision, lambda text: progress.update(task, description=text), timeout)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)
    for diff in diffs:
        if as_json:
            print(json.dumps(diff.to_json()))
            continue
        problem = diff.run.problem
        sizes = f"batch {problem.batch}, width {problem.width}, {problem.layers} layers, {problem.dtype}"
        heading = f"{diff.run.strategy}, {diff.run.implementation}, for {diff.target} ({diff.run.mesh}): {sizes}"
        console.print(f"[bold]{heading}[/]")
        for part in diff_view.tables(diff):
            console.print(part)
        console.print()
    if png is not None:
        for strategy, group in itertools.groupby(diffs, lambda diff: diff.run.strategy):
            several = diffs[0].run.strategy != diffs[-1].run.strategy
            diff_view.picture(list(group), png.with_stem(f"{png.stem}_{strategy}") if several else png)
    return int(any(fails(diff.rows, fail_on) for diff in diffs))
