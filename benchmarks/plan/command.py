"""The command `shardiff plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.options import BATCH, DTYPE, JSON, LAYERS, OUTPUT, WIDTH
from shardiff.cli.answers import one_of, refuse, repeatable

if TYPE_CHECKING:
    from benchmarks.plan.plan import Plan
    from benchmarks.plan.priced import Compiled


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
    batch: Annotated[int | None, BATCH] = None,
    width: Annotated[int | None, WIDTH] = None,
    layers: Annotated[int | None, LAYERS] = None,
    dtype: Annotated[str | None, DTYPE] = None,
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
    target: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:SIZE",
            help="Also compile the first meshes for this hardware, and price what XLA derives: h100:2x8.",
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw step time over the rate of the links to this file.")
    ] = None,
    prove: Annotated[
        bool, typer.Option("--prove", help="Run every mesh on this machine over links shaped to order; see --shape.")
    ] = False,
    shape: Annotated[
        list[str] | None,
        repeatable("HOSTSxRANKS", "To prove: 1x2, 1x4, 2x2, ... Default: these three; with --real 1x2."),
    ] = None,
    rate: Annotated[
        list[str] | None,
        repeatable("RATE", "To prove: of the links. Default: 5, 10, 20 and 50mbit; with --real 100 to 800mbit."),
    ] = None,
    real: Annotated[
        bool, typer.Option("--real", help="To prove: with the CPU's own speed, not with a paced device of 0.1 GFLOP/s.")
    ] = False,
    claims: Annotated[
        bool, typer.Option("--claims", help="To prove: what is said of strategies and links, and nothing else.")
    ] = False,
    iterations: Annotated[int, typer.Option(metavar="N", help="To prove: steps of each mesh.")] = 3,
    output: Annotated[Path | None, OUTPUT] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Predict the step time and memory of every mesh on given devices and links, and rank the meshes.

    With --prove, run them too: each rank in a network namespace of its own, over links of the stated rates.
    Exit status of that: 1 if a value, the bytes on a link, or a rate is not what it should be.
    """
    from benchmarks.plan import plan as planning
    from contract.optimizer import OPTIMIZERS
    from contract.planner.search import Asked
    from contract.problem import DTYPES, Problem
    from shardiff.system.files import check_path

    usual = Problem(4096, 8192, 16, "bfloat16")
    if prove:
        usual = Problem(256, 512, 4) if real else Problem(128, 256, 4)
    given = {"batch": batch, "width": width, "layers": layers, "dtype": dtype}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        one_of("dtype", str(given.get("dtype", usual.dtype)), DTYPES)
        one_of("optimizer", optimizer, OPTIMIZERS)
        for name, value in {**given, "top": top, "iterations": iterations}.items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        problem = replace(usual, **given)
        check_path("picture", picture, ".png")
        check_path("output", output, ".json")
        if prove:
            from benchmarks.plan.prove import answer as proving

            chosen = any((shape, rate, mesh, given, real, microbatches))
            if claims and chosen:
                raise ValueError("--claims has its own shapes, rates, meshes and sizes")
            campaign = proving.plan(shape or (), rate or (), mesh or (), problem, real, iterations, microbatches)
            raise typer.Exit(proving.answer(None if claims else campaign, output, json))
        for name, value in (
            ("--shape", shape),
            ("--rate", rate),
            ("--real", real),
            ("--claims", claims),
            ("--output", output),
        ):
            if value:
                raise ValueError(f"{name} is for --prove")
        asked = Asked(
            problem, optimizer, tuple(strategy or ()), tuple(microbatches or ()), tuple(schedule or ("gpipe",))
        )
        machine = planning.machine_of(devices, links, inside, between)
        answer = planning.plan(
            machine, asked, [explain] if explain else mesh or [], top, False if explain else crossovers
        )
        derived = None
        if target is not None:
            from benchmarks.plan import compiled

            derived = compiled.compile_meshes([one.run for one in answer.ranking.best[:3]], target, machine)
    except ValueError as error:
        refuse(str(error))
    show(answer, derived, bool(explain), json)
    if picture is not None:
        from benchmarks.plan import picture as drawing

        drawing.picture(answer, picture)


def show(answer: Plan, derived: list[Compiled] | None, explained: bool, as_json: bool) -> None:
    """Print tables, the arithmetic, or JSON."""
    from benchmarks import terminal
    from benchmarks.plan import explain, priced, view
    from benchmarks.plan.plan import document

    if as_json:
        more = None if derived is None else [priced.document(one, answer.machine) for one in derived]
        terminal.show_json({**document(answer), "compiled": more})
    elif explained:
        for one in answer.ranking.best[:1]:
            terminal.show(explain.lines(one, answer.machine), width=160)
    else:
        terminal.show(view.parts(answer), width=140)
    if derived is not None and not as_json:
        terminal.show(view.compiled(derived, answer.machine), width=140)
