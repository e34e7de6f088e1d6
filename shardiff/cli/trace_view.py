"""What `shardiff trace` prints, in each format."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from shardiff.diff.record_view import table
from shardiff.formats import as_csv, as_github, as_junit, as_markdown
from shardiff.program import Program
from shardiff.record import SCHEMA, Record, totals
from shardiff.summary import Summary, summarize, totals_text, view
from shardiff.tracing.calls import ranks_text
from shardiff.tracing.timeline import as_perfetto
from shardiff.tracing.traced import Traced

FORMATS = ("table", "json", "csv", "markdown", "perfetto", "github", "junit")
FULL = 40  # records that are shown one by one; of more, a summary


def present(
    traced: Traced, checks: dict[str, list[str]], format: str = "table", steps: int | None = None, every: bool = False
) -> None:
    """Print. checks: what was asked of the program, and the lines of each that failed. format: one of FORMATS.

    steps: so many are told one by one. every: show each record of a large program.
    """
    program = traced.program
    summary = summarize(program)
    if format == "table":
        return show_table(traced, summary, steps, every)
    problems = [*traced.errors, *traced.warnings, *traced.notes]
    if format == "json":
        text = json.dumps(document(traced, steps), indent=2) + "\n"
    elif format == "csv":
        text = as_csv(program.records)
    elif format == "markdown":
        text = as_markdown(program.records, headline(traced, summary), problems)
    elif format == "perfetto":
        text = as_perfetto(traced.calls) + "\n"
    elif format == "github":
        text = as_github(traced.errors, traced.warnings, "; ".join([headline(traced, summary), *traced.notes]))
    else:
        text = as_junit(f"shardiff trace {program.label}", checks)
    sys.stdout.write(text)
    if format in ("csv", "perfetto"):  # which have no place for them
        for line in problems:
            print(f"shardiff: {line}", file=sys.stderr)


def document(traced: Traced, steps: int | None = None) -> dict[str, Any]:
    """As JSON. The records are those of the whole run; `segments` has them by step."""
    program, summary = traced.program, summarize(traced.program)

    def part(records: Sequence[Record]) -> dict[str, Any]:
        return {"records": [record.to_json() for record in records], "totals": totals(records)}

    return {
        "schema": SCHEMA,
        "program": program.label,
        "ranks": traced.num_ranks,
        **part(program.records),
        "busiest_rank": vars(summary.busiest) if summary.busiest else None,
        "idlest_rank": vars(summary.idlest) if summary.idlest else None,
        "disagreements": traced.errors,
        "warnings": traced.warnings,
        "notes": traced.notes,
        "segments": {name: part(each.records) for name, each in chosen(program, steps).items()},
    }


def chosen(program: Program, steps: int | None) -> dict[str, Program]:
    """The segments, but of the steps only so many."""
    left = set([name for name in program.segments if name.startswith("step ")][:steps])
    return {name: part for name, part in program.segments.items() if name in left or not name.startswith("step ")}


def headline(traced: Traced, summary: Summary) -> str:
    """A line: what ran, and what it sent in all."""
    return f"{traced.program.label}, {ranks_text(range(traced.num_ranks))}: {totals_text(summary)}"


def show_table(traced: Traced, summary: Summary, steps: int | None, every: bool) -> None:
    """For people."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    program = traced.program

    def records(part: Program) -> None:
        if part.records and (every or len(part.records) <= FULL):
            console.print(table(part.records, by_rank=True))
        elif part.records:
            console.print(view(summarize(part)))
            console.print(f"{len(part.records):,} records; --all shows each", markup=False)

    if steps is None:
        records(program)
    else:
        told: list[tuple[str, Program]] = []
        for name, part in chosen(program, steps).items():
            if told and told[-1][1].records == part.records and told[-1][0].startswith("step "):
                told[-1] = (f"{told[-1][0].partition(' to ')[0]} to {name.removeprefix('step ')}, each", part)
            else:
                told.append((name, part))
        for name, part in told:
            console.print(f"{name}: {totals_text(summarize(part))}", markup=False)
            records(part)
        if not program.steps:
            console.print("no end of a step was seen: no optimizer's step, and no shardiff.step()")
    console.print(headline(traced, summary), markup=False)
    headings = (
        ("[bold red]Wrong:[/]", traced.errors),
        ("[bold yellow]Ranks meet with different things, which may be wrong:[/]", traced.warnings),
        ("[bold]Note:[/]", traced.notes),
    )
    for heading, lines in headings:
        if lines:
            console.print(heading)
        for line in lines:
            console.print(line, markup=False)
