"""The command `shardiff bench steps`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.options import (
    CHUNKS,
    DEVICE,
    DTYPE,
    JSON,
    MICROBATCHES,
    OUTPUT,
    RESHARD,
    RESUME,
    SCHEDULE,
    reshard_of,
)
from benchmarks.problem_options import takes_problem
from shardiff.cli.answers import TIMEOUT, refuse, repeatable

if TYPE_CHECKING:
    from benchmarks.steps.steps import Plan
    from contract.problem import Problem


@takes_problem
def steps(
    problem: Problem,
    ranks: Annotated[list[int] | None, repeatable("N", "Number of ranks, one process each. Default: 2 and 4.")] = None,
    strategy: Annotated[
        list[str] | None, repeatable("NAME", "data_parallel, ... or single_device. Default: all but zero2.")
    ] = None,
    mesh: Annotated[
        list[str] | None,
        repeatable("AXIS=N,...", "Axes of a mesh, outermost first, such as dp=2,tp=2; replaces --ranks."),
    ] = None,
    implementation: Annotated[
        list[str] | None,
        repeatable("NAME", "torch, shard_map, annotated or peer (the library equivalent). Default: all four."),
    ] = None,
    iterations: Annotated[int, typer.Option(metavar="N", help="Timed steps of each contestant.")] = 30,
    rounds: Annotated[
        int, typer.Option(metavar="N", help="Rounds that the steps are split into; torch and JAX take turns in each.")
    ] = 3,
    microbatches: Annotated[int, MICROBATCHES] = 4,
    schedule: Annotated[str, SCHEDULE] = "gpipe",
    chunks: Annotated[int, CHUNKS] = 2,
    reshard: Annotated[str | None, RESHARD] = None,
    recompute: Annotated[
        list[str] | None,
        repeatable(
            "NAME",
            "What a transformer's backward pass computes again: none, block or selective; or offload, with which it "
            "finds everything in the host's memory (torch). With several, ours take part with each, and the first is "
            "what the others are compared with. Default: none.",
        ),
    ] = None,
    dtype: Annotated[str, DTYPE] = "float32",
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="sgd or adamw.")] = "adamw",
    speed_batch: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Batch, of a transformer tokens, for comparing a single device with its own matrix-product rate.",
        ),
    ] = 2048,
    device: Annotated[str, DEVICE] = "auto",
    timeout: Annotated[float, TIMEOUT] = 30.0,
    output: Annotated[Path | None, OUTPUT] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the step times to this file.")] = None,
    resume: Annotated[bool, RESUME] = False,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Time training steps of every strategy in torch, in JAX and in the library equivalent of each.

    Exit status: 1 if two contestants do not train the same.
    """
    from benchmarks import bench, memory_limit
    from benchmarks.problems import words
    from benchmarks.steps import steps as measuring
    from shardiff.system import environment, memory
    from shardiff.system.files import check_path

    try:
        plan = measuring.plan(
            ranks or (),
            strategy or (),
            implementation or measuring.IMPLEMENTATIONS,
            replace(problem, dtype=dtype),
            optimizer=optimizer,
            microbatches=microbatches,
            schedule=schedule,
            chunks=chunks,
            iterations=iterations,
            rounds=rounds,
            device=device,
            timeout=timeout,
            speed_batch=speed_batch,
            meshes=mesh or (),
            reshard=reshard_of(reshard),
            recompute=recompute or ("none",),
        )
        check_path("output", output, ".json")
        check_path("picture", picture, ".png")
        memory_limit.require_processes(plan.runs)
        memory.require(memory_limit.of_steps(plan.contestants()), words(plan.runs[0].problem))
        environment.check(jax=any(name != "torch" for name in plan.implementations))
        kept = bench.kept(measuring.begin(plan), output, resume)
    except ValueError as error:
        refuse(str(error))
    raise typer.Exit(answer(plan, output, picture, json, kept))


def answer(plan: Plan, output: Path | None, picture: Path | None, as_json: bool, kept: dict[str, Any] | None) -> int:
    """Measure, print tables or JSON, and draw; the exit status."""
    from benchmarks import bench, terminal
    from benchmarks.documents.results_io import parse_as
    from benchmarks.documents.steps import Steps
    from benchmarks.steps import picture as drawing
    from benchmarks.steps import steps as measuring
    from benchmarks.steps import view

    document, placed = bench.measured(
        lambda save, starting: measuring.measure(plan, save, starting, kept), output, blocks=None
    )
    result = parse_as(Steps, document)
    terminal.show_json(document) if as_json else terminal.show(view.parts(result))
    if picture is not None:
        drawing.picture(result, picture)
    return (0 if result.holds else 1) if placed else 2
