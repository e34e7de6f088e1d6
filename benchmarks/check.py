"""Every strategy and implementation against the one single-device reference, number by number.

`plan` says what to run, `rows` runs it and judges each result by `contract.proof`, `table` and `to_json` show it.
torch and jax are imported by the run that needs them, not before: a wrong input is told at once.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any

from contract import reference
from contract.problem import Problem
from contract.proof import Proof, prove
from contract.strategy import STRATEGIES, Run, RunResult, one_axis, parse_axes
from shardiff.ranks.processes import WorkerError
from shardiff.ranks.torch_pool import TORCHRUN
from shardiff.ranks.watchdog import watched
from shardiff.system import machine
from shardiff.system.interrupt import deferred_interrupts

if TYPE_CHECKING:
    from rich.table import Table

KEYS = {  # claim -> its key in JSON
    "loss": "loss_error",
    "gradients": "grad_error",
    "gradient norm": "grad_norm_error",
    "parameters": "param_error",
}


SHOWN = ("loss", "gradients", "parameters")


class RunFailed(Exception):
    """A run that ended in an error instead of a result. str: which run, in a line; report: the worker's own error."""

    def __init__(self, run: Run, headline: str, report: str) -> None:
        super().__init__(f"{label(run)}: {headline}")
        self.report = report


@dataclass(frozen=True)
class Row:
    """One run and what its result proves."""

    run: Run
    proof: Proof


def label(run: Run) -> str:
    """A run in the words of the table: torch tensor_parallel tp=4 float32 adamw."""
    return f"{run.implementation} {run.strategy} {run.mesh} {run.problem.dtype} {run.optimizer}"


def plan(
    implementations: Sequence[str],
    strategies: Sequence[str] = (),
    degrees: Sequence[int] = (),
    dtypes: Sequence[str] = ("float32",),
    optimizers: Sequence[str] = ("adamw",),
    problem: Problem | None = None,
    meshes: Sequence[str] = (),
    **rest: Any,
) -> list[Run]:
    """One Run for each combination; `rest` goes to all of them. Raises ValueError if one cannot work.

    Without degrees: 4, or as many as torchrun started, and 1 for single_device. meshes: `dp=2,tp=2`; the strategies are
    then those of their axes (`contract.strategy.parse_axes`), and degrees follow.
    """
    started = torchrun_ranks()
    if meshes and degrees:
        raise ValueError("a mesh says the number of ranks: give --mesh or --degree, not both")
    if meshes:
        chosen = [parse_axes(mesh, tuple(strategies)) for mesh in meshes]
    else:
        chosen = [
            one_axis(strategy, degree)
            for strategy in strategies or STRATEGIES
            for degree in degrees or [1 if strategy == "single_device" else started or 4]
        ]
    runs = []
    for implementation, axes, dtype, optimizer in product(implementations, chosen, dtypes, optimizers):
        run = Run(implementation, axes, replace(problem or Problem(), dtype=dtype), optimizer, **rest)
        if implementation == "torch" and started and run.world_size not in (1, started):
            ranks = f"{run.world_size} ranks" if meshes else f"degree {run.world_size}"
            raise ValueError(f"{ranks}, but torchrun started {started} processes; give --degree {started}")
        runs.append(run)
    return list(dict.fromkeys(runs))


def torchrun_ranks() -> int | None:
    """How many processes torchrun started, if this is one of them. They are then the ranks of torch runs."""
    return int(os.environ["WORLD_SIZE"]) if os.environ.keys() >= set(TORCHRUN) else None


def rows(runs: Sequence[Run], timeout: float, starting: Callable[[Run], None] = lambda run: None) -> Iterator[Row]:
    """Run and judge, in the order given. starting: called before each run. Raises RunFailed.

    timeout: seconds of silence after which a worker, or a run of JAX, counts as stuck.
    """
    wants: dict[Run, RunResult] = {}
    owns: dict[Run, RunResult] = {}
    with ExitStack() as stack:
        execute = executor(runs, timeout, stack)
        for run in runs:
            starting(run)
            want = _once(wants, single_device(run, "torch", "float64"), reference.run)
            got = execute(run)
            own = None
            if run.problem.dtype == "bfloat16":
                own = _once(owns, single_device(run, run.implementation, "bfloat16"), execute)
            yield Row(run, prove(run, got, want, own))


def single_device(run: Run, implementation: str, dtype: str) -> Run:
    """The run that `run` should equal: the same numbers on one device."""
    problem = replace(run.problem, dtype=dtype)
    return replace(
        run, implementation=implementation, axes=one_axis("single_device", 1), problem=problem, microbatches=1
    )


def executor(runs: Sequence[Run], timeout: float, stack: ExitStack) -> Callable[[Run], RunResult]:
    """A function that runs any of `runs`, or their single-device runs. What it starts ends with `stack`."""
    in_torch = [run for run in runs if run.implementation == "torch"]
    in_jax = [run for run in runs if run.implementation != "torch"]
    pool: Any = None
    if in_torch:  # first, because its processes import torch while this one starts jax
        from shardiff.ranks import torch_pool as launch

        most = 1 if torchrun_ranks() else max(run.world_size for run in in_torch)
        pool = stack.enter_context(launch.workers(most, runs[0].device, timeout))
    if in_jax:
        with failing_as(in_jax[0]):
            start_jax(max(run.world_size for run in in_jax), runs[0].device)

    def execute(run: Run) -> RunResult:
        with failing_as(run):
            with deferred_interrupts():
                train = import_module("torch_impl.train" if run.implementation == "torch" else "jax_impl.train")
            if run.implementation != "torch":
                with watched(label(run), timeout):
                    return train.run(run)
            return train.run(run, None if run.world_size == torchrun_ranks() else pool)

    return execute


def start_jax(count: int, device: str) -> None:
    """Import jax with `count` devices, whose number is fixed from then on."""
    from shardiff.ranks import jax_devices as devices

    with deferred_interrupts():
        devices.prepare(count, device)
    devices.devices(count, device)


@contextmanager
def failing_as(run: Run) -> Iterator[None]:
    """Turn any error into RunFailed. A worker's is reported as it stands, another with a traceback from `run` on."""
    try:
        yield
    except Exception as error:
        text = str(error).strip()
        if isinstance(error, WorkerError):
            raise RunFailed(run, text.splitlines()[0].rstrip(":"), text) from error
        frames = error.__traceback__
        while frames and frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        report = "".join(traceback.format_exception(type(error), error, frames))
        raise RunFailed(run, f"{type(error).__name__}: {text.splitlines()[0] if text else ''}", report) from error


def show(runs: Sequence[Run], timeout: float, as_json: bool) -> int:
    """Run `runs`, print the table or the JSON, and return the exit status. Progress goes to a terminal on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    checked: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed = None
    speaks = torchrun_ranks() is None or os.environ["RANK"] == "0"  # under torchrun all ranks have the same results
    silent = not (speaks and sys.stderr.isatty())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=silent) as progress:
        task = progress.add_task("", total=len(runs))
        try:
            for row in rows(runs, timeout, lambda run: progress.update(task, description=label(run))):
                checked.append(row)
                progress.advance(task)
        except RunFailed as error:
            failed = error
    if not speaks and not failed:
        pass
    elif as_json and not failed:
        document = {"schema": 2, "rows": [to_json(row) for row in checked], "machine": machine.facts()}
        print(json.dumps(document, indent=2, allow_nan=False))
    elif checked and not as_json:
        console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
        console.print(table(checked, console.width))
        for line in [*summary(checked), setting(runs), machine.summary(machine.facts())]:
            console.print(line, markup=False)
    if failed:
        print(failed.report.rstrip(), file=sys.stderr)
        print("shardiff:", failed, file=sys.stderr)
        return 3
    return 0 if all(row.proof.passed for row in checked) else 1


def setting(runs: Sequence[Run]) -> str:
    """What all runs of a check have in common."""
    problem = runs[0].problem
    shared = [f"batch {problem.batch}", f"width {problem.width}", f"{problem.layers} layers", f"{runs[0].steps} steps"]
    for values in ({run.problem.dtype for run in runs}, {run.optimizer for run in runs}):
        shared += values if len(values) == 1 else []
    return f"{', '.join(shared)}; pipeline_parallel in {runs[0].microbatches} microbatches"


def to_json(row: Row) -> dict[str, Any]:
    """A row as plain JSON types. An error that is not finite is null: JSON has no NaN."""
    run, errors = row.run, row.proof.errors
    return {
        "implementation": run.implementation,
        "strategy": run.strategy,
        "mesh": str(run.mesh),
        "dtype": run.problem.dtype,
        "optimizer": run.optimizer,
        "steps": run.steps,
        **{key: errors[claim] if math.isfinite(errors[claim]) else None for claim, key in KEYS.items()},
        "passed": row.proof.passed,
    }


def table(checked: Sequence[Row], columns: int) -> Table:
    """One line a row, for a terminal of so many columns. Where they are few, what all rows share is left out."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    named = {
        "implementation": [row.run.implementation for row in checked],
        "strategy": [row.run.strategy for row in checked],
        "mesh": [str(row.run.mesh) for row in checked],
        "dtype": [row.run.problem.dtype for row in checked],
        "optimizer": [row.run.optimizer for row in checked],
    }
    widths = [max(map(len, (name, *values))) for name, values in named.items()]
    widths += [max(7, len(claim)) for claim in (*SHOWN, "verdict")]
    narrow = columns < sum(widths) + 3 * len(widths)
    if narrow:
        named = {name: values for name, values in named.items() if len(set(values)) > 1 or name == "strategy"}
    result = Table(box=SIMPLE_HEAD, padding=0 if narrow else (0, 2, 0, 0), pad_edge=False)
    for name in named:
        result.add_column("implemen-\ntation" if narrow and name == "implementation" else name, overflow="fold")
    for claim in SHOWN:
        result.add_column(claim, justify="right", no_wrap=True, min_width=max(len(claim), 7))
    result.add_column("verdict", no_wrap=True)
    for cells, row in zip(zip(*named.values(), strict=True), checked, strict=True):
        errors = [f"{row.proof.errors[claim]:.1e}" for claim in SHOWN]
        result.add_row(*cells, *errors, "[green]equal[/]" if row.proof.passed else "[red]DIFFERS[/]")
    return result


def summary(checked: Sequence[Row]) -> list[str]:
    """How many rows hold, and what fails in those that do not."""
    failing = [row for row in checked if not row.proof.passed]
    lines = [f"{len(checked) - len(failing)} of {len(checked)} equal the single-device reference"]
    return lines + [f"{label(row.run)}: {failure}" for row in failing for failure in row.proof.failures]


def _once(results: dict[Run, RunResult], run: Run, compute: Callable[[Run], RunResult]) -> RunResult:
    if run not in results:
        results[run] = compute(run)
    return results[run]
