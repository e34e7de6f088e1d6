"""The command `shardiff lesson`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.options import DTYPE, JSON, MICROBATCHES, RECOMPUTE, RESHARD, reshard_of
from benchmarks.problem_options import takes_problem
from shardiff.cli.answers import TIMEOUT, check_timeout, refuse, repeatable

if TYPE_CHECKING:
    from contract.problem import Problem


@takes_problem
def lesson(
    problem: Problem,
    strategy: Annotated[
        list[str] | None, typer.Argument(metavar="STRATEGY...", help="A strategy, or those of the axes of --mesh.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="AXIS=N,...", help="Axes of one mesh, outermost first, such as dp=2,fsdp=4.")
    ] = None,
    degree: Annotated[int, typer.Option(metavar="N", help="Number of ranks of one strategy.")] = 4,
    target: Annotated[
        list[str] | None,
        repeatable("NAME:SIZE", "Hardware to compile for, such as h100:8. Default: cpu. none: nothing is run."),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write the lesson as one page.")] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw who holds what to this file.")] = None,
    microbatches: Annotated[int, MICROBATCHES] = 4,
    reshard: Annotated[str | None, RESHARD] = None,
    recompute: Annotated[str, RECOMPUTE] = "none",
    dtype: Annotated[str, DTYPE] = "float32",
    timeout: Annotated[float, TIMEOUT] = 30.0,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Show a strategy as one lesson: its three files, who holds what, what is sent, and what XLA derives.

    All of it is read from the code, computed, traced or compiled. Without --output, it is printed.
    """
    from benchmarks import diff_strategies, memory_limit, terminal
    from benchmarks.lesson import view
    from benchmarks.lesson.made import make
    from benchmarks.lesson.picture import picture as draw
    from benchmarks.problems import words
    from contract.axes import one_axis, parse_axes
    from shardiff.system import environment, memory
    from shardiff.system.files import check_path, write

    try:
        check_path("output", output, ".html")
        check_path("picture", picture, ".png")
        check_timeout(timeout)
        if not strategy and mesh is None:
            raise ValueError("give a strategy, such as shardiff lesson fully_sharded, or a --mesh")
        if len(strategy or ()) > 1 and mesh is None:
            raise ValueError("several strategies need a --mesh with an axis for each")
        rest = {"microbatches": microbatches, "reshard": reshard_of(reshard), "recompute": recompute}
        problem = replace(problem, dtype=dtype)
        asked = [] if target == ["none"] else target or ["cpu"]
        axes = parse_axes(mesh, tuple(strategy or ())) if mesh else one_axis((strategy or [""])[0], degree)
        ranks = prod(axis.size for axis in axes)
        named = [f"cpu:{ranks}" if each == "cpu" else each for each in asked]
        derived = "shard_map" if any(axis.strategy == "ring_attention" for axis in axes) else "annotated"
        pairs = diff_strategies.plan(strategy or [], derived, ranks, mesh, named, problem, **rest)
        memory.require(memory_limit.of_diff([run for run, _ in pairs]), words(pairs[0][0].problem))
        environment.check(jax=bool(asked))
        targets = [each for _, each in pairs] if asked else []
        with terminal.progress() as update:
            made = make(pairs[0][0], targets, lambda text: update(description=text), timeout)
    except ValueError as error:
        refuse(str(error))
    if json:
        terminal.show_json(made.to_json())
    elif output is None:
        terminal.show(view.parts(made), width=140)
    if output is not None:
        write(output, view.page(made))
        print(f"The lesson is in {os.fspath(output)}.", file=sys.stderr if json else sys.stdout)
    if picture is not None:
        draw(made, picture)
