"""The command `shardiff bench bubbles`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.options import CHUNKS, DEVICE, DTYPE, JSON, OUTPUT, RESUME
from benchmarks.problem_options import takes_problem
from shardiff.cli.answers import TIMEOUT, refuse, repeatable

if TYPE_CHECKING:
    from benchmarks.bubbles.plan import Plan
    from contract.problem import Problem

LARGE = {"batch": 2048, "width": 2048, "layers": 16}  # an MLP whose passes take much longer than what is sent


@partial(takes_problem, of_mlp=LARGE)
def bubbles(
    problem: Problem,
    stages: Annotated[
        list[int] | None, repeatable("P", "Number of stages, one process each. Default: 2 and 4.")
    ] = None,
    microbatches: Annotated[list[int] | None, repeatable("M", "Number of microbatches. Default: 8.")] = None,
    schedule: Annotated[
        list[str] | None,
        repeatable("NAME", "naive, gpipe, 1f1b, interleaved, zb_h1 or zb_v. Default: all that are possible."),
    ] = None,
    chunks: Annotated[int, CHUNKS] = 2,
    implementation: Annotated[
        list[str] | None, repeatable("NAME", "torch, shard_map or annotated. Default: all three.")
    ] = None,
    iterations: Annotated[int, typer.Option(metavar="N", help="Timed steps of each pipeline.")] = 6,
    dtype: Annotated[str, DTYPE] = "float32",
    paced: Annotated[
        bool,
        typer.Option(
            "--paced", help="Run torch on devices with a clock of their own, as is done for more stages than cores."
        ),
    ] = False,
    paced_seconds: Annotated[
        float, typer.Option(metavar="S", help="What a forward pass of a microbatch takes on a paced stage.")
    ] = 0.4,
    device: Annotated[str, DEVICE] = "auto",
    timeout: Annotated[float, TIMEOUT] = 30.0,
    output: Annotated[Path | None, OUTPUT] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw a Gantt chart of the stages to this file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write a trace to this file, for ui.perfetto.dev.")
    ] = None,
    resume: Annotated[bool, RESUME] = False,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Measure the bubble of a pipeline in every schedule, and the activations it keeps, beside the closed forms.

    The MLP is larger here unless its sizes are given: batch 2048, width 2048, 16 layers.
    """
    from benchmarks import bench, memory_limit
    from benchmarks.bubbles import bubbles as measuring
    from benchmarks.bubbles import plan as planning
    from benchmarks.problems import words
    from shardiff.system import environment, memory
    from shardiff.system.files import check_path

    try:
        plan = planning.plan(
            stages or (2, 4),
            microbatches or (8,),
            implementation or measuring.IMPLEMENTATIONS,
            replace(problem, dtype=dtype),
            iterations=iterations,
            device=device,
            timeout=timeout,
            schedules=schedule or (),
            chunks=chunks,
            paced=paced,
            paced_seconds=paced_seconds,
        )
        check_path("output", output, ".json")
        check_path("picture", picture, ".png")
        check_path("trace", trace, ".json")
        memory.require(memory_limit.of_steps([(run, 1) for run in plan.runs]), words(plan.runs[0].problem))
        environment.check(jax=any(run.implementation != "torch" for run in plan.runs))
        kept = bench.kept(measuring.begin(plan), output, resume)
    except ValueError as error:
        refuse(str(error))
    raise typer.Exit(answer(plan, output, picture, trace, json, kept))


def answer(
    plan: Plan,
    output: Path | None,
    picture: Path | None,
    trace: Path | None,
    as_json: bool,
    kept: dict[str, Any] | None,
) -> int:
    """Measure, print a table or JSON, write the trace, and draw; the exit status."""
    from benchmarks import bench, terminal
    from benchmarks.bubbles import bubbles as measuring
    from benchmarks.bubbles import picture as drawing
    from benchmarks.bubbles import timeline, view
    from benchmarks.documents.bubbles import Bubbles
    from benchmarks.documents.results_io import parse_as
    from shardiff.system.files import write

    document, placed = bench.measured(
        lambda save, starting: measuring.measure(plan, save, starting, kept), output, len(plan.runs)
    )
    result = parse_as(Bubbles, document)
    terminal.show_json(document) if as_json else terminal.show(view.parts(result))
    if trace is not None:
        write(trace, timeline.chrome_trace(view.titled(result)))
    if picture is not None:
        drawing.picture(result, picture)
    return 0 if placed else 2
