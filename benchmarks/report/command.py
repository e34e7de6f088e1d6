"""The command `shardiff report`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardiff.cli.answers import TIMEOUT, check_timeout, one_of, refuse, repeatable

if TYPE_CHECKING:
    from benchmarks.report.report import Plan


def report(
    compare: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[A B]", help="Compare two results instead: two files, or two directories of results."),
    ] = None,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for the report and everything that belongs to it.")
    ] = Path("report"),
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="Small sizes, for about a minute, or the sizes of each command.")
    ] = False,
    section: Annotated[
        list[str] | None, repeatable("NAME", "check, diff, collectives, steps or bubbles. Default: all of them.")
    ] = None,
    results: Annotated[
        list[Path] | None,
        repeatable("FILE.json", "Use this result instead of measuring: a file, or a directory of results."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what an earlier run has left in the directory.")
    ] = False,
    fail_on: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="With two results, slower: exit with status 1 if the second is slower."),
    ] = None,
    timeout: Annotated[float | None, TIMEOUT] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print a line about each section; of two results, every figure.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the complete JSON instead of a summary.")] = False,
) -> None:
    """Measure everything and write one HTML file, with Markdown and JSON beside it; or compare two results.

    Exit status: 1 if something that should be equal is not, 3 if a section could not be completed.
    """
    from benchmarks.report import report as reporting

    try:
        if fail_on is not None:
            one_of("fail-on", fail_on, ("slower",))
        if compare:
            if len(compare) != 2 or results or section or fresh or quick:
                raise ValueError("to compare, give two results and nothing to measure")
            raise typer.Exit(answer_comparison(compare[0], compare[1], fail_on, verbose, json))
        if fail_on is not None:
            raise ValueError("fail-on needs two results to compare")
        check_timeout(1.0 if timeout is None else timeout)
        todo = reporting.plan(output, results or (), section or (), quick, fresh, timeout)
    except ValueError as error:
        refuse(str(error))
    raise typer.Exit(answer(todo, verbose, json))


def answer(todo: Plan, verbose: bool, as_json: bool) -> int:
    """Make and write a report, print its summary or its JSON; the exit status."""
    from benchmarks import terminal
    from benchmarks.report import report as reporting
    from shardiff.system import machine

    def tell(line: str) -> None:
        if verbose:
            print(line, file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        made = reporting.gather(todo, tell)
    finally:
        signal.signal(signal.SIGTERM, before)
    page = todo.output / "report.html"
    tell(f"writing {page}")
    reporting.write_all(made, todo.output)
    if as_json:
        terminal.show_json(made.document)
    else:
        facts = machine.summary(made.document["machine"])
        terminal.show([*made.lines(), facts, f"{page}, with report.md and report.json beside it"])
    return 3 if made.failures else 0 if made.holds else 1


def answer_comparison(old: Path, new: Path, fail_on: str | None, verbose: bool, as_json: bool) -> int:
    """Print how two results differ; 1 if fail_on is "slower" and something is, else 0. Raises ValueError."""
    from benchmarks import terminal
    from benchmarks.documents.results_io import parsed, read
    from benchmarks.report import compare, compare_view

    comparison = compare.compare(parsed(read(old)), parsed(read(new)))
    if as_json:
        terminal.show_json(comparison)
    else:
        terminal.show(compare_view.parts(comparison, verbose))
    slower = any(row["flag"] == compare.SLOWER for row in comparison["rows"])
    return int(fail_on == "slower" and slower)
