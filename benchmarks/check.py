"""Every strategy and implementation against the one single-device reference, number by number.

`plan` says what to run; `rows` runs it and judges each result by `contract.proof`; `document` makes it JSON. torch and
jax are imported by the run that needs them and not before, so that a wrong input is refused at once.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from typing import Any

from benchmarks.problems import sizes_of, strategies_of, with_experts
from contract import reference
from contract.axes import ALL_AXES, one_axis, parse_axes
from contract.problem import Problem
from contract.proof import Proof, prove
from contract.strategy import IMPLEMENTATIONS, Run, RunResult
from contract.transformer import Transformer
from shardiff.ranks.silence import watched
from shardiff.ranks.verdict import WorkerError
from shardiff.system import machine, torchrun
from shardiff.system.interrupt import deferred_interrupts

KEYS = {  # claim -> its key in JSON
    "loss": "loss_error",
    "gradients": "grad_error",
    "gradient norm": "grad_norm_error",
    "parameters": "param_error",
}


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

    Without implementations: all that can run the schedule. Without strategies: all that can train the problem, or those
    with a schedule other than GPipe's. An annotated ring, which no annotation derives, is refused only if both are
    named, and else left out. Without degrees: 4, or as many as torchrun started, and 1 for single_device. meshes:
    `dp=2,tp=2`; the strategies are then those of their axes (`contract.axes.parse_axes`), and degrees follow.
    """
    started, schedule = torchrun_ranks(), rest.get("schedule", "gpipe")
    problem = problem or Problem()
    if meshes and degrees:
        raise ValueError("a mesh says the number of ranks: give --mesh or --degree, not both")
    if meshes:
        chosen = [parse_axes(mesh, tuple(strategies)) for mesh in meshes]
    else:
        chosen = [
            one_axis(strategy, degree)
            for strategy in strategies or (usual(problem) if schedule == "gpipe" else ("pipeline_parallel",))
            for degree in degrees or [1 if strategy == "single_device" else started or 4]
        ]
    runs = []
    for implementation, axes, dtype, optimizer in product(
        implementations or IMPLEMENTATIONS, chosen, dtypes, optimizers
    ):
        names = [axis.strategy for axis in axes]
        if implementation == "annotated":  # what no annotation expresses is left out, unless it is asked for by name
            if schedule != "gpipe" and not implementations:
                continue
            if "ring_attention" in names and not (implementations and (strategies or meshes)):
                continue
        run = Run(implementation, axes, with_experts(replace(problem, dtype=dtype), names), optimizer, **rest)
        if implementation == "torch" and started and run.world_size not in (1, started):
            ranks = f"{run.world_size} ranks" if meshes else f"degree {run.world_size}"
            raise ValueError(f"{ranks}, but torchrun started {started} processes; give --degree {started}")
        runs.append(run)
    return list(dict.fromkeys(runs))


def usual(problem: Problem) -> list[str]:
    """The strategies to check if none is named: experts count their tokens over the whole sequence, so no cp."""
    whole = isinstance(problem, Transformer) and problem.experts
    return [name for name in strategies_of(problem) if not (whole and ALL_AXES[name] == "cp")]


def torchrun_ranks() -> int | None:
    """How many processes torchrun started, if this is one of them. They are then the ranks of torch runs."""
    here = torchrun.started()
    return here.world_size if here else None


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
            proof = prove(run, got, want, own)
            if run.problem.dtype == "float32" and not proof.passed and run.strategies:  # rounding, or a mistake?
                alone = _once(owns, single_device(run, run.implementation, "float32"), execute)
                proof = prove(run, got, want, alone)
            yield Row(run, proof)


def single_device(run: Run, implementation: str, dtype: str) -> Run:
    """The run that `run` should equal: the same numbers on one device."""
    problem = replace(run.problem, dtype=dtype)
    return replace(run.on_one_device, implementation=implementation, problem=problem)


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


def document(checked: Sequence[Row]) -> dict[str, Any]:
    """The runs, at least one, with their machine and settings: what `shardiff check --json` prints."""
    run = checked[0].run
    on_gpus = run.device != "cpu" and machine.num_gpus() >= max(row.run.world_size for row in checked)
    return {
        "kind": "check",
        "schema": 1,
        "machine": machine.facts(),
        "settings": {
            **{name: size for name, size in sizes_of(run).items() if name not in ("dtype", "seed", "experts")},
            "microbatches": run.microbatches,
            "schedule": run.schedule,
            "device": "cuda" if on_gpus else "cpu",
        },
        "rows": [to_json(row) for row in checked],
    }


def to_json(row: Row) -> dict[str, Any]:
    """A row as plain JSON types. An error that is not finite is null, because JSON has no NaN."""
    run, errors = row.run, row.proof.errors
    return {
        **described(run),
        **{key: errors[claim] if math.isfinite(errors[claim]) else None for claim, key in KEYS.items()},
        "passed": row.proof.passed,
    }


def _once(results: dict[Run, RunResult], run: Run, compute: Callable[[Run], RunResult]) -> RunResult:
    if run not in results:
        results[run] = compute(run)
    return results[run]


def described(run: Run) -> dict[str, Any]:
    """What was run, as a row of JSON begins."""
    row = {
        "implementation": run.implementation,
        "strategy": run.strategy,
        "mesh": str(run.mesh),
        "dtype": run.problem.dtype,
        "optimizer": run.optimizer,
        "steps": run.steps,
    }
    return {**row, "experts": run.problem.experts} if isinstance(run.problem, Transformer) else row
