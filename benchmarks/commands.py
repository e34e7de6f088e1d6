"""What a checkout adds to the command: check, bench, report, plan, and the diff of strategies.

`shardiff.cli.checkout` finds this file beside the package. Commands only: each imports what it runs when it runs.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.bubbles.command import bubbles
from benchmarks.collectives.command import collectives
from benchmarks.lesson.command import lesson
from benchmarks.options import (
    BATCH,
    CHUNKS,
    DEVICE,
    DTYPE,
    JSON,
    LAYERS,
    MICROBATCHES,
    RESHARD,
    SCHEDULE,
    WIDTH,
    reshard_of,
)
from benchmarks.plan.command import plan
from benchmarks.report.command import report
from benchmarks.steps.command import steps
from shardiff.cli.answers import TIMEOUT, check_timeout, one_of, refuse, repeatable

if TYPE_CHECKING:
    from contract.strategy import Run


def register(app: typer.Typer) -> None:
    """Add the commands to the application. A command of the same name gives way."""
    app.command()(check)
    app.command()(diff)
    app.add_typer(bench, name="bench")
    app.command()(report)
    app.command()(lesson)
    app.command()(plan)


def check(
    implementation: Annotated[
        list[str] | None, repeatable("NAME", "torch, shard_map or annotated. Default: all three.")
    ] = None,
    strategy: Annotated[
        list[str] | None,
        repeatable(
            "NAME",
            "data_parallel, tensor_parallel, megatron_tensor_parallel, pipeline_parallel or single_device. "
            "Default: the four parallel ones.",
        ),
    ] = None,
    degree: Annotated[
        list[int] | None, repeatable("N", "Number of ranks. Default: 4, and 1 for single_device.")
    ] = None,
    mesh: Annotated[
        list[str] | None,
        repeatable(
            "AXIS=N,...",
            "Axes of a mesh, outermost first, such as dp=2,tp=2. Each axis has its usual strategy (dp data_parallel, "
            "tp megatron_tensor_parallel, pp pipeline_parallel) or the one that --strategy names.",
        ),
    ] = None,
    dtype: Annotated[list[str] | None, repeatable("NAME", "float64, float32 or bfloat16. Default: float32.")] = None,
    optimizer: Annotated[list[str] | None, repeatable("NAME", "sgd or adamw. Default: adamw.")] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Number of training steps.")] = 3,
    batch: Annotated[int, BATCH] = 128,
    width: Annotated[int, WIDTH] = 1024,
    layers: Annotated[int, LAYERS] = 4,
    microbatches: Annotated[int, MICROBATCHES] = 4,
    schedule: Annotated[str, SCHEDULE] = "gpipe",
    chunks: Annotated[int, CHUNKS] = 2,
    reshard: Annotated[str | None, RESHARD] = None,
    device: Annotated[str, DEVICE] = "auto",
    timeout: Annotated[float, TIMEOUT] = 30.0,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Train with every strategy and implementation, and show how far each result is from the single-device reference.

    Exit status: 1 if a result differs by more than rounding explains.
    """
    from benchmarks import check as checking
    from benchmarks import memory_limit
    from contract.problem import Problem
    from shardiff.system import environment, memory

    try:
        runs = checking.plan(
            implementation or (),
            strategy or (),
            degree or (),
            dtype or ("float32",),
            optimizer or ("adamw",),
            Problem(batch, width, layers),
            mesh or (),
            steps=steps,
            microbatches=microbatches,
            schedule=schedule,
            chunks=chunks,
            reshard=reshard_of(reshard),
            device=device,
        )
    except ValueError as error:
        refuse(str(error))
    if not 0 < timeout < float("inf"):
        refuse(f"timeout must be a number of seconds above 0, got {timeout}")
    if device == "cuda":
        from shardiff.system.machine import num_gpus

        most = max(run.world_size for run in runs)
        if num_gpus() < most:
            refuse(f"device cuda needs a GPU for each rank: degree {most}, GPUs {num_gpus()}; try --device cpu")
    try:
        memory_limit.require_processes(runs)
        memory.require(memory_limit.of_check(runs), memory_limit.describe(runs[0].problem))
        environment.check(jax=any(run.implementation != "torch" for run in runs))
    except ValueError as error:
        refuse(str(error))
    raise typer.Exit(answer_check(runs, timeout, json))


def answer_check(runs: Sequence[Run], timeout: float, as_json: bool) -> int:
    """Run, and print the table or the JSON; the exit status. What was finished before a run failed is shown too."""
    from benchmarks import check as checking
    from benchmarks import check_view, terminal

    checked: list[checking.Row] = []
    failed = None
    speaks = checking.torchrun_ranks() is None or os.environ["RANK"] == "0"  # torchrun's ranks have the same results
    with terminal.progress(len(runs), silent=not speaks) as update:
        try:
            for row in checking.rows(runs, timeout, lambda run: update(description=checking.label(run))):
                checked.append(row)
                update(completed=len(checked))
        except checking.RunFailed as error:
            failed = error
    if checked and (speaks or failed):
        if not as_json:
            terminal.show(check_view.parts(checked, terminal.console().width))
        elif not failed:
            terminal.show_json(checking.document(checked))
    if failed:
        print(failed.report.rstrip(), file=sys.stderr)
        print("shardiff:", failed, file=sys.stderr)
        return 3
    return 0 if all(row.proof.passed for row in checked) else 1


def diff(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STRATEGY... | LEFT RIGHT",
            help="Strategies; or two programs, each a .json of shardiff's, HLO text, FILE.py:FUNCTION, or SCRIPT.py.",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        repeatable("NAME:SIZE", "Hardware to compile for, such as cpu:8, h100:2x8 or v5e:2x4. Default: cpu:4."),
    ] = None,
    implementation: Annotated[
        str, typer.Option(metavar="NAME", help="JAX implementation that XLA compiles: annotated or shard_map.")
    ] = "annotated",
    degree: Annotated[
        int | None, typer.Option(metavar="N", help="Number of ranks. Default: all devices of the target.")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=N,...",
            help="Axes of one mesh, outermost first, such as dp=2,tp=4. The strategies are those of the axes.",
        ),
    ] = None,
    left_target: Annotated[str | None, typer.Option(metavar="NAME:SIZE", help="Of LEFT, a FILE.py:FUNCTION.")] = None,
    right_target: Annotated[str | None, typer.Option(metavar="NAME:SIZE", help="Of RIGHT.")] = None,
    nproc: Annotated[int | None, typer.Option(metavar="N", help="Processes of a SCRIPT.py that is traced.")] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="K", help="Which training step of a traced run; the last by default. 0: all of it."),
    ] = None,
    left_mesh: Annotated[
        str | None,
        typer.Option(metavar="AXIS=N,...", help="Mesh of the ranks of LEFT, outermost axis first: dp=2,tp=4."),
    ] = None,
    right_mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=N,...",
            help="Mesh of the ranks of RIGHT. With both meshes, axes of the same name are the same ranks.",
        ),
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="NAME", help="Precision of matrix products: default (as in a plain jit) or highest.")
    ] = "default",
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="Exit with status 1 if there are unexplained rows (unexplained) or extra bytes (extra-bytes).",
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the bytes to this file, or to one for each strategy.")
    ] = None,
    batch: Annotated[int, BATCH] = 128,
    width: Annotated[int, WIDTH] = 1024,
    layers: Annotated[int, LAYERS] = 4,
    microbatches: Annotated[int, MICROBATCHES] = 4,
    schedule: Annotated[str, SCHEDULE] = "gpipe",
    chunks: Annotated[int, CHUNKS] = 2,
    reshard: Annotated[str | None, RESHARD] = None,
    spelling: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How fully_sharded is annotated: best, or naive, which states how the parameters are split and "
            "nothing else.",
        ),
    ] = "best",
    dtype: Annotated[str, DTYPE] = "float32",
    timeout: Annotated[float, TIMEOUT] = 30.0,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one line with one object for each strategy and target.")
    ] = False,
) -> None:
    """Compare the communication written in torch with what XLA derives, for hardware that need not be here.

    Given two files, compare the programs in them.
    """
    from benchmarks import diff_strategies as diffing
    from benchmarks import memory_limit
    from contract.problem import Problem
    from contract.strategy import STRATEGIES
    from shardiff.cli import diff as of_programs
    from shardiff.system import environment, memory
    from shardiff.system.files import check_path

    try:
        one_of("precision", precision, ("default", "highest"))
        if fail_on is not None:
            one_of("fail-on", fail_on, ("unexplained", "extra-bytes"))
        what = what or []
        if not what and mesh is None:
            raise ValueError("give a strategy, a --mesh, or two files")
        problem = Problem(batch, width, layers, dtype)
        rest: dict[str, Any] = {"microbatches": microbatches, "schedule": schedule, "chunks": chunks}
        rest |= {"reshard": reshard_of(reshard), "spelling": spelling}
        if len(what) == 2 and not set(what) <= set(STRATEGIES):
            first = target[0] if target else None
            targets, meshes = (left_target or first, right_target or first), (left_mesh or mesh, right_mesh or mesh)
            made: dict[str, Any] = {}
            for word, axes in zip(what, meshes, strict=True):
                if word in STRATEGIES:
                    ranks = None if axes else degree or nproc
                    ((run, _),) = diffing.plan([word], implementation, ranks, axes, (), problem, **rest)
                    made[word] = functools.partial(diffing.written, run, timeout)
            pair = of_programs.plan(what, targets, meshes, nproc, step, fail_on, made)
            raise typer.Exit(of_programs.run(pair, bool(left_mesh and right_mesh), fail_on, json))
        if left_mesh or right_mesh or left_target or right_target or nproc is not None or step is not None:
            raise ValueError("--left-..., --right-..., --nproc and --step are for two programs that are no strategies")
        check_path("picture", picture, ".png")
        check_timeout(timeout)
        pairs = diffing.plan(what, implementation, degree, mesh, target or (), problem, **rest)
        memory.require(memory_limit.of_diff([run for run, _ in pairs]), memory_limit.describe(problem))
        environment.check(jax=True)
        raise typer.Exit(answer_diff(pairs, precision, fail_on, picture, json, timeout))
    except ValueError as error:
        refuse(str(error))


def answer_diff(
    pairs: Sequence[tuple[Run, Any]],
    precision: str,
    fail_on: str | None,
    picture: Path | None,
    as_json: bool,
    timeout: float,
) -> int:
    """Compute the diffs, print them as tables or as one line of JSON each, and draw; the exit status.

    Raises ValueError for what cannot be compiled.
    """
    import json

    from benchmarks import diff_strategies, diff_view, terminal

    with terminal.progress() as update:
        diffs = diff_strategies.compute(pairs, precision, lambda text: update(description=text), timeout)
    for one in diffs:
        if as_json:
            print(json.dumps(one.to_json()))
        else:
            terminal.show(diff_view.parts(one), width=140)
    if picture is not None:
        diff_view.pictures(diffs, picture)
    return int(any(one.diff.fails(fail_on) for one in diffs))


bench = typer.Typer(
    help="Measure both frameworks in one run, and print the machine and the method beside every figure."
)
bench.command()(collectives)
bench.command()(steps)
bench.command()(bubbles)
