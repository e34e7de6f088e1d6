"""What a checkout adds to the command: check, bench, report, and the diff of strategies.

`shardiff.cli.checkout` finds this file beside the package. Commands only: each imports what it runs when it runs.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.report.command import report
from shardiff.cli.answers import TIMEOUT, check_timeout, one_of, refuse, repeatable


def register(app: typer.Typer) -> None:
    """Add the commands to the application. A command of the same name gives way."""
    app.command()(check)
    app.command()(diff)
    app.add_typer(bench, name="bench")
    app.command()(report)


def check(
    implementation: Annotated[
        list[str] | None, repeatable("NAME", "torch, shard_map or annotated. All three by default.")
    ] = None,
    strategy: Annotated[
        list[str] | None,
        repeatable(
            "NAME",
            "data_parallel, tensor_parallel, megatron_tensor_parallel, pipeline_parallel or single_device. "
            "The four parallel ones by default.",
        ),
    ] = None,
    degree: Annotated[list[int] | None, repeatable("N", "Number of ranks. 4 by default, 1 for single_device.")] = None,
    mesh: Annotated[
        list[str] | None,
        repeatable(
            "AXIS=N,...",
            "Axes of a mesh, outermost first, each with its usual strategy (dp data_parallel, tp "
            "megatron_tensor_parallel, pp pipeline_parallel) or the one that --strategy names: dp=2,tp=2.",
        ),
    ] = None,
    dtype: Annotated[list[str] | None, repeatable("NAME", "float64, float32 or bfloat16. float32 by default.")] = None,
    optimizer: Annotated[list[str] | None, repeatable("NAME", "sgd or adamw. adamw by default.")] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps.")] = 3,
    batch: Annotated[int, typer.Option(metavar="N", help="Samples in a step, over all ranks.")] = 128,
    width: Annotated[int, typer.Option(metavar="N", help="Width of every layer.")] = 1024,
    layers: Annotated[int, typer.Option(metavar="N", help="Layers.")] = 4,
    microbatches: Annotated[int, typer.Option(metavar="N", help="Microbatches of pipeline_parallel.")] = 4,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cpu, cuda, or auto: CUDA where there are as many GPUs as ranks.")
    ] = "auto",
    timeout: Annotated[float, TIMEOUT] = 30.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train with every strategy and implementation; show how far each is from the single-device reference."""
    from benchmarks import check as checking
    from benchmarks import memory_limit
    from contract.problem import Problem
    from contract.strategy import IMPLEMENTATIONS
    from shardiff.system import environment, memory

    try:
        runs = checking.plan(
            implementation or IMPLEMENTATIONS,
            strategy or (),
            degree or (),
            dtype or ("float32",),
            optimizer or ("adamw",),
            Problem(batch, width, layers),
            mesh or (),
            steps=steps,
            microbatches=microbatches,
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
    raise typer.Exit(checking.show(runs, timeout, json))


def diff(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STRATEGY... | LEFT RIGHT",
            help="Strategies; or two programs, each a .json of shardiff's, HLO text, FILE.py:FUNCTION, or SCRIPT.py.",
        ),
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(metavar="NAME:SIZE", help="cpu:8, h100:2x8, v5e:2x4, ... Repeatable.")
    ] = None,
    implementation: Annotated[
        str, typer.Option(metavar="NAME", help="annotated or shard_map: what XLA compiles.")
    ] = "annotated",
    degree: Annotated[int | None, typer.Option(metavar="N", help="Ranks. By default all devices of a target.")] = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXIS=N,...", help="Axes of one mesh, outermost first; strategies are theirs: dp=2,tp=4."),
    ] = None,
    left_target: Annotated[str | None, typer.Option(metavar="NAME:SIZE", help="Of LEFT, a FILE.py:FUNCTION.")] = None,
    right_target: Annotated[str | None, typer.Option(metavar="NAME:SIZE", help="Of RIGHT.")] = None,
    nproc: Annotated[int | None, typer.Option(metavar="N", help="Processes of a SCRIPT.py that is traced.")] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="K", help="Which training step of a traced run; the last by default. 0: all of it."),
    ] = None,
    left_mesh: Annotated[
        str | None, typer.Option(metavar="dp=2,tp=4", help="Of A.json: its ranks, axes outermost first.")
    ] = None,
    right_mesh: Annotated[
        str | None,
        typer.Option(metavar="tp=4,dp=2", help="Of B.json. With both, axes of equal names are the same ranks."),
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="NAME", help="Of matrix products: default (a plain jit's) or highest.")
    ] = "default",
    fail_on: Annotated[
        str | None, typer.Option(metavar="WHAT", help="Exit with 1 on: unexplained, extra-bytes.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Write a picture of the bytes, for each strategy.")
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Samples in a step, over all ranks.")] = 128,
    width: Annotated[int, typer.Option(metavar="N", help="Width of every layer.")] = 1024,
    layers: Annotated[int, typer.Option(metavar="N", help="Layers.")] = 4,
    microbatches: Annotated[int, typer.Option(metavar="N", help="Microbatches of pipeline_parallel.")] = 4,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="float64, float32 or bfloat16.")] = "float32",
    timeout: Annotated[float, TIMEOUT] = 30.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line for each target.")] = False,
) -> None:
    """Compare the communication that torch code writes with what XLA derives, for hardware that need not be here."""
    from benchmarks import diff_strategies as diffing
    from benchmarks import diff_view, memory_limit
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
        if len(what) == 2 and not set(what) <= set(STRATEGIES):
            first = target[0] if target else None
            targets, meshes = (left_target or first, right_target or first), (left_mesh or mesh, right_mesh or mesh)
            made: dict[str, Any] = {}
            for word, axes in zip(what, meshes, strict=True):
                if word in STRATEGIES:
                    ranks = None if axes else degree or nproc
                    ((run, _),) = diffing.plan([word], implementation, ranks, axes, (), problem, microbatches)
                    made[word] = functools.partial(diffing.written, run, timeout)
            pair = of_programs.plan(what, targets, meshes, nproc, step, fail_on, made)
            raise typer.Exit(of_programs.run(pair, bool(left_mesh and right_mesh), fail_on, json))
        if left_mesh or right_mesh or left_target or right_target or nproc is not None or step is not None:
            raise ValueError("--left-..., --right-..., --nproc and --step are for two programs that are no strategies")
        check_path("picture", picture, ".png")
        check_timeout(timeout)
        pairs = diffing.plan(what, implementation, degree, mesh, target or (), problem, microbatches)
        memory.require(memory_limit.of_diff([run for run, _ in pairs]), memory_limit.describe(problem))
        environment.check(jax=True)
        with diff_view.progress() as told:
            diffs = diffing.compute(pairs, precision, told, timeout)
        diff_view.show(diffs, json)
        if picture is not None:
            diff_view.pictures(diffs, picture)
        raise typer.Exit(int(any(one.diff.fails(fail_on) for one in diffs)))
    except ValueError as error:
        refuse(str(error))


bench = typer.Typer(help="Measure both frameworks in one run, with the machine and the method beside every figure.")


@bench.callback()
def options() -> None:
    pass


def _earlier(started: dict[str, Any], output: Path | None) -> dict[str, Any] | None:
    from benchmarks.documents.resume import earlier

    if output is None:
        raise ValueError("--resume needs --output FILE.json, the file of the run to go on with")
    return earlier(output, started)


@bench.command()
def collectives(
    op: Annotated[
        list[str] | None, repeatable("NAME", "broadcast, all_reduce, permute, ... All nine by default.")
    ] = None,
    ranks: Annotated[list[int] | None, repeatable("N", "Ranks, a process each. 2 and 4 by default.")] = None,
    size: Annotated[
        list[str] | None, repeatable("SIZE", "Payload S: 4KiB, 100MB, ... Instead of --min, --max.")
    ] = None,
    smallest: Annotated[str, typer.Option("--min", metavar="SIZE", help="Smallest payload of the sweep.")] = "1KiB",
    largest: Annotated[str, typer.Option("--max", metavar="SIZE", help="Largest; the sweep goes by 4.")] = "16MiB",
    iterations: Annotated[int, typer.Option(metavar="N", help="Timed calls of each size.")] = 20,
    implementation: Annotated[list[str] | None, repeatable("NAME", "torch or jax. Both by default.")] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cpu, cuda, or auto: CUDA where there are as many GPUs as ranks.")
    ] = "auto",
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", help="For one size and mode; if it does not suffice, fewer calls.")
    ] = 10.0,
    bare: Annotated[bool, typer.Option("--bare", help="Time a bare loop around the same calls too.")] = False,
    timeout: Annotated[float, TIMEOUT] = 30.0,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the JSON here, anew after every block.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Write a picture of busbw over size.")
    ] = None,
    go_on: Annotated[
        bool, typer.Option("--resume", help="Keep what an interrupted run has finished in --output, measure the rest.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Time every collective in torch.distributed and in JAX: one process per rank, the same transport and threads."""
    from benchmarks import memory_limit
    from benchmarks.collectives import collectives as measuring
    from shardiff.system import environment, memory
    from shardiff.system.files import check_path

    try:
        plan = measuring.plan(
            op, ranks, size or measuring.sweep(smallest, largest), implementation, device, iterations, budget, bare
        )
        check_path("output", output, ".json")
        check_path("picture", picture, ".png")
        check_timeout(timeout)
        memory.require(memory_limit.of_collectives(plan.ops, plan.ranks, plan.sizes), "the largest payload")
        environment.check(jax="jax" in plan.implementations)
        kept = _earlier(measuring.begin(plan), output) if go_on else None
    except ValueError as error:
        refuse(str(error))
    raise typer.Exit(measuring.show(plan, output, picture, json, timeout, kept))


@bench.command()
def steps(
    ranks: Annotated[list[int] | None, repeatable("N", "Ranks, a process each. 2 and 4 by default.")] = None,
    strategy: Annotated[
        list[str] | None, repeatable("NAME", "data_parallel, ..., or single_device. All five by default.")
    ] = None,
    mesh: Annotated[
        list[str] | None,
        repeatable("AXIS=N,...", "Axes of a mesh, outermost first, instead of --ranks: dp=2,tp=2."),
    ] = None,
    implementation: Annotated[
        list[str] | None,
        repeatable("NAME", "torch, shard_map, annotated or peer: the library equivalent. All by default."),
    ] = None,
    iterations: Annotated[int, typer.Option(metavar="N", help="Timed steps of each contestant.")] = 30,
    rounds: Annotated[int, typer.Option(metavar="N", help="Turns of torch and JAX that they are split into.")] = 3,
    batch: Annotated[int, typer.Option(metavar="N", help="Samples in a step, over all ranks.")] = 128,
    width: Annotated[int, typer.Option(metavar="N", help="Width of every layer.")] = 1024,
    layers: Annotated[int, typer.Option(metavar="N", help="Layers.")] = 4,
    microbatches: Annotated[int, typer.Option(metavar="N", help="Microbatches of pipeline_parallel.")] = 4,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="float64, float32 or bfloat16.")] = "float32",
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="sgd or adamw.")] = "adamw",
    speed_batch: Annotated[
        int, typer.Option(metavar="N", help="Batch of the single device's share of the matrix-product rate.")
    ] = 2048,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cpu, cuda, or auto: CUDA where there are as many GPUs as ranks.")
    ] = "auto",
    timeout: Annotated[float, TIMEOUT] = 30.0,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the JSON here, anew after every block.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Write a picture of step times.")] = None,
    go_on: Annotated[
        bool, typer.Option("--resume", help="Keep what an interrupted run has finished in --output, measure the rest.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Time training steps of every strategy in torch and JAX, and of what a user would pick instead, in one run."""
    from benchmarks import memory_limit
    from benchmarks.steps import steps as measuring
    from contract.problem import Problem
    from shardiff.system import environment, memory
    from shardiff.system.files import check_path

    try:
        plan = measuring.plan(
            ranks or (),
            strategy or (),
            implementation or measuring.IMPLEMENTATIONS,
            Problem(batch, width, layers, dtype),
            optimizer=optimizer,
            microbatches=microbatches,
            iterations=iterations,
            rounds=rounds,
            device=device,
            timeout=timeout,
            speed_batch=speed_batch,
            meshes=mesh or (),
        )
        check_path("output", output, ".json")
        check_path("picture", picture, ".png")
        memory_limit.require_processes(plan.runs)
        memory.require(memory_limit.of_steps(plan.contestants()), memory_limit.describe(plan.runs[0].problem))
        environment.check(jax=any(name != "torch" for name in plan.implementations))
        kept = _earlier(measuring.begin(plan), output) if go_on else None
    except ValueError as error:
        refuse(str(error))
    from benchmarks.steps import view as steps_view

    raise typer.Exit(steps_view.show(plan, output, picture, json, kept))


@bench.command()
def bubbles(
    stages: Annotated[list[int] | None, repeatable("P", "Stages, a process each. 2 by default.")] = None,
    microbatches: Annotated[list[int] | None, repeatable("M", "Microbatches. 1, 2, 4, 8 and 16 by default.")] = None,
    implementation: Annotated[list[str] | None, repeatable("NAME", "torch, shard_map or annotated. All three.")] = None,
    iterations: Annotated[int, typer.Option(metavar="N", help="Steps of each.")] = 6,
    batch: Annotated[int, typer.Option(metavar="N", help="Samples in a step.")] = 2048,
    width: Annotated[int, typer.Option(metavar="N", help="Width of every layer.")] = 2048,
    layers: Annotated[int, typer.Option(metavar="N", help="Layers.")] = 16,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="float64, float32 or bfloat16.")] = "float32",
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cpu, cuda, or auto: CUDA where there are as many GPUs as stages.")
    ] = "auto",
    timeout: Annotated[float, TIMEOUT] = 30.0,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the JSON here, anew after every block.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Write a Gantt chart of the stages.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write a trace for ui.perfetto.dev.")] = None,
    go_on: Annotated[
        bool, typer.Option("--resume", help="Keep what an interrupted run has finished in --output, measure the rest.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the bubble of naive and GPipe pipelines from timelines, beside the closed form."""
    from benchmarks import memory_limit
    from benchmarks.bubbles import bubbles as measuring
    from contract.problem import Problem
    from shardiff.system import environment, memory
    from shardiff.system.files import check_path

    try:
        plan = measuring.plan(
            stages or (2,),
            microbatches or (1, 2, 4, 8, 16),
            implementation or measuring.IMPLEMENTATIONS,
            Problem(batch, width, layers, dtype),
            iterations=iterations,
            device=device,
            timeout=timeout,
        )
        check_path("output", output, ".json")
        check_path("picture", picture, ".png")
        check_path("trace", trace, ".json")
        memory.require(
            memory_limit.of_steps([(run, 1) for run in plan.runs]), memory_limit.describe(plan.runs[0].problem)
        )
        environment.check(jax=any(run.implementation != "torch" for run in plan.runs))
        kept = _earlier(measuring.begin(plan), output) if go_on else None
    except ValueError as error:
        refuse(str(error))
    from benchmarks.bubbles import view as bubbles_view

    raise typer.Exit(bubbles_view.show(plan, output, picture, trace, json, kept))
