"""The command `shardiff plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.options import BATCH, DTYPE, JSON, LAYERS, WIDTH
from shardiff.cli.answers import one_of, refuse, repeatable

if TYPE_CHECKING:
    from benchmarks.plan.plan import Plan


def plan(
    devices: Annotated[
        str,
        typer.Option(
            metavar="NAME:HOSTSxDEVICES",
            help="a100, h100, h200, b200, v5e, v5p, v6e or tpu7x with a size, such as h100:8 or h100:4x8 (on TPUs a "
            "host stands for a slice); or FILE.json of a machine.",
        ),
    ] = "h100:4x8",
    links: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Links as shardiff bench collectives --output has measured them."),
    ] = None,
    inside: Annotated[
        str | None, typer.Option(metavar="RATE", help="Links of one device inside its host: 400GB/s or 100gbit.")
    ] = None,
    between: Annotated[
        str | None, typer.Option(metavar="RATE", help="Links of one host to the others, together: 400gbit.")
    ] = None,
    mesh: Annotated[
        list[str] | None, repeatable("AXIS=N,...", "Mesh to predict, outermost axis first. Default: all meshes.")
    ] = None,
    strategy: Annotated[
        list[str] | None, repeatable("NAME", "Strategy for its axis, instead of the usual one: tensor_parallel.")
    ] = None,
    microbatches: Annotated[
        list[int] | None, repeatable("N", "Of a pipeline. Default: 1, 2 and 4 times its stages.")
    ] = None,
    schedule: Annotated[list[str] | None, repeatable("NAME", "Of a pipeline: gpipe, 1f1b, ... Default: gpipe.")] = None,
    batch: Annotated[int, BATCH] = 4096,
    width: Annotated[int, WIDTH] = 8192,
    layers: Annotated[int, LAYERS] = 16,
    dtype: Annotated[str, DTYPE] = "bfloat16",
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="sgd or adamw.")] = "adamw",
    top: Annotated[int, typer.Option(metavar="N", help="How many meshes to show.")] = 10,
    crossovers: Annotated[
        bool | None,
        typer.Option(
            "--crossovers/--no-crossovers",
            help="Find where another mesh becomes the fastest. Default: if there are at most 200 meshes.",
        ),
    ] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="AXIS=N,...", help="Show the arithmetic of this mesh, term by term.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw step time over the rate of the links to this file.")
    ] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Predict the step time and memory of every mesh on given devices and links, and rank the meshes."""
    from benchmarks.plan import plan as planning
    from contract.optimizer import OPTIMIZERS
    from contract.planner.search import Asked
    from contract.problem import DTYPES, Problem
    from shardiff.system.files import check_path

    try:
        one_of("dtype", dtype, DTYPES)
        one_of("optimizer", optimizer, OPTIMIZERS)
        for name, value in (("batch", batch), ("width", width), ("layers", layers), ("top", top)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        check_path("picture", picture, ".png")
        asked = Asked(
            Problem(batch, width, layers, dtype),
            optimizer,
            tuple(strategy or ()),
            tuple(microbatches or ()),
            tuple(schedule or ("gpipe",)),
        )
        machine = planning.machine_of(devices, links, inside, between)
        meshes = [explain] if explain else mesh or []
        answer = planning.plan(machine, asked, meshes, top, False if explain else crossovers)
    except ValueError as error:
        refuse(str(error))
    show(answer, bool(explain), json)
    if picture is not None:
        from benchmarks.plan import picture as drawing

        drawing.picture(answer, picture)


def show(answer: Plan, explained: bool, as_json: bool) -> None:
    """Print tables, the arithmetic, or JSON."""
    from benchmarks import terminal
    from benchmarks.plan import explain, view
    from benchmarks.plan.plan import document

    if as_json:
        terminal.show_json(document(answer))
    elif explained:
        for one in answer.ranking.best[:1]:
            terminal.show(explain.lines(one, answer.machine), width=160)
    else:
        terminal.show(view.parts(answer), width=140)
