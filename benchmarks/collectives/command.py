"""The command `shardiff bench collectives`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.options import DEVICE, JSON, OUTPUT, RESUME
from shardiff.cli.answers import TIMEOUT, check_timeout, refuse, repeatable

if TYPE_CHECKING:
    from benchmarks.collectives.collectives import Plan


def collectives(
    op: Annotated[
        list[str] | None, repeatable("NAME", "Collective: broadcast, all_reduce, permute, ... Default: all nine.")
    ] = None,
    ranks: Annotated[list[int] | None, repeatable("N", "Number of ranks, one process each. Default: 2 and 4.")] = None,
    size: Annotated[
        list[str] | None, repeatable("SIZE", "Payload S, such as 4KiB or 100MB; replaces --min and --max.")
    ] = None,
    smallest: Annotated[
        str, typer.Option("--min", metavar="SIZE", help="Smallest payload; each one is 4 times the one before.")
    ] = "1KiB",
    largest: Annotated[str, typer.Option("--max", metavar="SIZE", help="Largest payload.")] = "16MiB",
    iterations: Annotated[int, typer.Option(metavar="N", help="Timed calls of each size.")] = 20,
    implementation: Annotated[list[str] | None, repeatable("NAME", "torch or jax. Default: both.")] = None,
    device: Annotated[str, DEVICE] = "auto",
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", help="Most time for one size and mode; fewer calls if it is too short.")
    ] = 10.0,
    bare: Annotated[bool, typer.Option("--bare", help="Also time a bare loop around the same calls.")] = False,
    wire: Annotated[
        bool,
        typer.Option(
            "--wire",
            help="Count the bytes that pass every rank's interface, in network namespaces, instead; --max only.",
        ),
    ] = False,
    timeout: Annotated[float, TIMEOUT] = 30.0,
    output: Annotated[Path | None, OUTPUT] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw bus bandwidth over payload to this file.")
    ] = None,
    resume: Annotated[bool, RESUME] = False,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Time every collective in torch.distributed and in JAX, with the same processes, transport and threads.

    Exit status: 1 if a collective gave a wrong value.
    """
    from benchmarks import bench
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
        if wire:
            raise typer.Exit(answer_wire(plan, output, json))
        memory.require(plan.memory, "the largest payload")
        environment.check(jax="jax" in plan.implementations)
        kept = bench.kept(measuring.begin(plan), output, resume)
    except ValueError as error:
        refuse(str(error))
    raise typer.Exit(answer(plan, output, picture, json, timeout, kept))


def answer(
    plan: Plan, output: Path | None, picture: Path | None, as_json: bool, timeout: float, kept: dict[str, Any] | None
) -> int:
    """Measure, print tables or JSON, and draw; the exit status."""
    from benchmarks import bench, terminal
    from benchmarks.collectives import collectives as measuring
    from benchmarks.collectives import picture as drawing
    from benchmarks.collectives import view
    from benchmarks.documents.collectives import Collectives
    from benchmarks.documents.results_io import parse_as

    document, placed = bench.measured(
        lambda save, starting: measuring.run(plan, save, starting, timeout, kept), output, plan.num_blocks
    )
    result = parse_as(Collectives, document)
    terminal.show_json(document) if as_json else terminal.show(view.parts(result))
    if picture is not None:
        drawing.picture(result, picture)
    return (0 if result.holds else 1) if placed else 2


def answer_wire(plan: Plan, output: Path | None, as_json: bool) -> int:
    """Count bytes on interfaces; the exit status. Raises ValueError where namespaces are refused."""
    import sys

    from benchmarks import terminal
    from benchmarks.collectives import wire
    from benchmarks.lab.lab import LabError, refusal
    from shardiff.system.files import keeper

    if flaw := refusal():
        raise ValueError(f"--wire: {flaw}")
    if min(plan.ranks) < 2:
        raise ValueError("--wire needs 2 ranks or more")
    keep = keeper(output)
    with terminal.progress() as update:
        try:
            document = wire.measure(
                plan.ops,
                plan.ranks,
                plan.sizes[-1],
                min(plan.iterations, 5),
                plan.implementations,
                lambda what: update(description=what),
            )
        except LabError as error:
            print(f"shardiff: {error}", file=sys.stderr)
            return 3
    placed = keep(document)
    terminal.show_json(document) if as_json else terminal.show(wire.parts(document), width=140)
    return 0 if placed else 2
