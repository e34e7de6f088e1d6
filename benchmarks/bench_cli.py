"""The commands `shardiff bench ...`: what is measured rather than proven."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

bench = typer.Typer(help="Measure both frameworks in one run, with the machine and the method beside every figure.")


TIMEOUT = typer.Option(metavar="SECONDS", help="Ranks that are idle and silent for longer count as stuck.")


def check_timeout(timeout: float) -> None:
    """ValueError unless it can be waited for."""
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout}")


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """ValueError unless the value of this option is known."""
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(known)}")


@bench.callback()
def options() -> None:
    pass


def repeatable(metavar: str, text: str) -> Any:
    """An option that may be given more than once."""
    return typer.Option(metavar=metavar, help=f"{text} Repeatable.")


def _earlier(started: dict[str, Any], output: Path | None) -> dict[str, Any] | None:
    from benchmarks.resume import earlier

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
    from benchmarks import collectives as measuring
    from benchmarks import environment, memory_limit
    from benchmarks.cli import refuse
    from benchmarks.figures import check_path

    try:
        plan = measuring.plan(
            op, ranks, size or measuring.sweep(smallest, largest), implementation, device, iterations, budget, bare
        )
        check_path("output", output, ".json")
        check_path("picture", picture, ".png")
        check_timeout(timeout)
        memory_limit.require(memory_limit.of_collectives(plan.ops, plan.ranks, plan.sizes), "the largest payload")
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
    implementation: Annotated[
        list[str] | None,
        repeatable("NAME", "torch, shard_map, annotated or peer: what a user would pick instead. All by default."),
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
    from benchmarks import environment, memory_limit
    from benchmarks import steps as measuring
    from benchmarks.cli import refuse
    from benchmarks.figures import check_path
    from contract.problem import Problem

    try:
        plan = measuring.plan(
            ranks or (2, 4),
            strategy or measuring.DEFAULT_STRATEGIES,
            implementation or measuring.IMPLEMENTATIONS,
            Problem(batch, width, layers, dtype),
            optimizer=optimizer,
            microbatches=microbatches,
            iterations=iterations,
            rounds=rounds,
            device=device,
            timeout=timeout,
            speed_batch=speed_batch,
        )
        check_path("output", output, ".json")
        check_path("picture", picture, ".png")
        memory_limit.require_processes(plan.runs)
        memory_limit.require(memory_limit.of_steps(plan.contestants()), memory_limit.describe(plan.runs[0].problem))
        environment.check(jax=any(name != "torch" for name in plan.implementations))
        kept = _earlier(measuring.begin(plan), output) if go_on else None
    except ValueError as error:
        refuse(str(error))
    from benchmarks import steps_view

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
    from benchmarks import bubbles as measuring
    from benchmarks import environment, memory_limit
    from benchmarks.cli import refuse
    from benchmarks.figures import check_path
    from contract.problem import Problem

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
        memory_limit.require(
            memory_limit.of_steps([(run, 1) for run in plan.runs]), memory_limit.describe(plan.runs[0].problem)
        )
        environment.check(jax=any(run.implementation != "torch" for run in plan.runs))
        kept = _earlier(measuring.begin(plan), output) if go_on else None
    except ValueError as error:
        refuse(str(error))
    from benchmarks import bubbles_view

    raise typer.Exit(bubbles_view.show(plan, output, picture, trace, json, kept))
