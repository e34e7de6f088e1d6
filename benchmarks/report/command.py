"""The command `shardiff report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardiff.cli.answers import TIMEOUT, check_timeout, one_of, refuse, repeatable


def report(
    compare: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[A B]", help="Two results to compare: files, or directories of them."),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where everything is written.")] = Path("report"),
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="Small sizes, in a minute; or those of each command.")
    ] = False,
    section: Annotated[
        list[str] | None, repeatable("NAME", "check, diff, collectives, steps or bubbles. All by default.")
    ] = None,
    results: Annotated[
        list[Path] | None, repeatable("FILE.json", "A result, or a directory of them, to take instead of measuring.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what an earlier run left in DIR.")] = False,
    fail_on: Annotated[str | None, typer.Option(metavar="WHAT", help="A comparison exits with 1 on: slower.")] = None,
    timeout: Annotated[float | None, TIMEOUT] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="A line for each section; every figure compared.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the complete JSON instead of a summary.")] = False,
) -> None:
    """Measure everything and write it as one HTML file, with Markdown and JSON beside it; or compare two results."""
    from benchmarks.report import report as reporting

    try:
        if fail_on is not None:
            one_of("fail-on", fail_on, ("slower",))
        if compare:
            if len(compare) != 2 or results or section or fresh or quick:
                raise ValueError("to compare, give two results and nothing to measure")
            raise typer.Exit(reporting.show_comparison(compare[0], compare[1], fail_on, verbose, json))
        if fail_on is not None:
            raise ValueError("fail-on goes with two results to compare")
        check_timeout(1.0 if timeout is None else timeout)
        todo = reporting.plan(output, results or (), section or (), quick, fresh, verbose, timeout)
    except ValueError as error:
        refuse(str(error))
    raise typer.Exit(reporting.show(todo, json))
