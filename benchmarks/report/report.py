"""What `shardiff report` does: all results in one HTML file, in Markdown and in JSON; or two results compared."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bubbles.timeline import chrome_trace
from benchmarks.bubbles.view import titled
from benchmarks.documents.results_io import SCHEMA, SECTIONS, read
from benchmarks.report import compare as report_compare
from benchmarks.report import html as report_html
from benchmarks.report import run as report_run
from benchmarks.report import sections as report_sections
from benchmarks.report.blocks import Items, Section, Text, pictures
from shardiff.system import machine
from shardiff.system.files import Document, keeper, unwritable, write

TITLE = "shardiff: parallel training in torch.distributed and in JAX"


@dataclass(frozen=True)
class Plan:
    """What to report, and where. given: sections that are taken as they are; the others of `sections` are measured.

    fresh: measure anew what an earlier run has left in `output`. verbose: a line on stderr for each section.
    timeout: the commands' own option, by default theirs.
    """

    output: Path
    sections: Sequence[str] = SECTIONS
    quick: bool = False
    given: Mapping[str, Document] = field(default_factory=dict)
    fresh: bool = False
    verbose: bool = False
    timeout: float | None = None


def plan(
    output: Path,
    results: Sequence[Path],
    sections: Sequence[str],
    quick: bool,
    fresh: bool,
    verbose: bool,
    timeout: float | None = None,
) -> Plan:
    """A Plan, with its output directory made. Raises ValueError in one line."""
    for section in sections:
        if section not in SECTIONS:
            raise ValueError(f"unknown section {section!r}; known: {', '.join(SECTIONS)}")
    given: dict[str, Document] = {}
    for path in results:
        given |= read(path)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{output}: {error.strerror}") from None
    if reason := unwritable(output / "report.json"):
        raise ValueError(f"{output}: cannot be written: {reason}")
    wanted = tuple(one for one in SECTIONS if not sections or one in sections)
    return Plan(output, wanted, quick, given, fresh, verbose, timeout)


def gather(todo: Plan) -> Document:
    """The report's document: every section given, found or measured. What failed is named, and the rest goes on."""
    sections: dict[str, Document] = {}
    failures: dict[str, str] = {}
    for name in todo.sections:
        if name in todo.given:
            sections[name], how = todo.given[name], "given"
            write(todo.output / f"{name}.json", sections[name])
        else:
            line = report_run.command(name, todo.quick, todo.timeout)
            found = None if todo.fresh else report_run.finished(name, line, todo.output)
            start = time.time()
            if found is None:
                _tell(todo, f"{name}: shardiff {line}")
                try:
                    found = report_run.measure(name, line, todo.output)
                except report_run.Failed as error:
                    failures[name] = str(error)
                    _tell(todo, f"{name}: failed")
                    if partial := report_run.unfinished(name, todo.output, start):
                        sections[name] = partial
                    continue
                how = f"{time.time() - start:.0f} s"
            else:
                how = "measured before"
            sections[name] = found
        _tell(todo, f"{name}: {how}")
    head = {"kind": "report", "schema": SCHEMA, "quick": todo.quick, "machine": machine.facts()}
    said = {name: report_sections.summary(name, one) for name, one in sections.items()}
    return {**head, "summary": said, "failures": failures, "sections": sections}


def _tell(todo: Plan, line: str) -> None:
    if todo.verbose:
        print(line, file=sys.stderr, flush=True)


def write_all(document: Document, directory: Path) -> None:
    """report.json, report.md with its pictures, and report.html, which is written last."""
    first, chapters = content(document)
    version = machine.version("shardiff")
    foot = f"Written by shardiff {version}, {document['machine']['date'][:16].replace('T', ' ')} UTC."
    keeper(directory / "report.json")(document)
    (directory / "pictures").mkdir(exist_ok=True)
    for picture in [one for chapter in chapters for one in pictures(chapter.blocks)]:
        write(directory / "pictures" / f"{picture.name}.svg", picture.svg)
    if bubbles := document["sections"].get("bubbles"):
        write(directory / "bubbles_trace.json", chrome_trace(titled(bubbles)))
    write(directory / "report.md", report_html.text(TITLE, first, chapters, foot))
    write(directory / "report.html", report_html.page(TITLE, first, chapters, foot))


def content(document: Document) -> tuple[Section, list[Section]]:
    """What stands on top, and the chapters."""
    top: list[Any] = [Items([line for lines in document["summary"].values() for line in lines])]
    if document["quick"]:
        text = "A quick report: small sizes and few iterations, to be looked at. Figures to keep come from"
        top.insert(0, Text(f"{text} shardiff report --full.", "warning"))
    top += [Text(f"{name} is not complete: {why}.", "warning") for name, why in document["failures"].items()]
    return Section("top", TITLE, top), [report_sections.section(*one) for one in document["sections"].items()]


def holds(sections: Mapping[str, Document]) -> bool:
    """Whether everything that was compared is equal."""
    rows = [row["passed"] for row in sections.get("check", {}).get("rows", ())]
    collectives = sections.get("collectives", {"rows": (), "identities": ()})
    rows += [row["correct"] for row in collectives["rows"]] + [one["holds"] for one in collectives["identities"]]
    return all(rows) and not sections.get("steps", {}).get("failures")


def show(todo: Plan, as_json: bool) -> int:
    """Make the report, print its summary or its JSON; the exit status."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        document = gather(todo)
    finally:
        signal.signal(signal.SIGTERM, before)
    _tell(todo, f"writing {todo.output / 'report.html'}")
    write_all(document, todo.output)
    if as_json:
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=True)
        for lines in document["summary"].values():
            for line in lines:
                console.print(line, markup=False)
        for name, why in document["failures"].items():
            console.print(f"{name} is not complete: {why}.", markup=False)
        console.print(machine.summary(document["machine"]), markup=False)
        console.print(f"{todo.output / 'report.html'}, with report.md and report.json beside it", markup=False)
    return 3 if document["failures"] else 0 if holds(document["sections"]) else 1


def show_comparison(old: Path, new: Path, fail_on: str | None, verbose: bool, as_json: bool) -> int:
    """Print how two results differ; returns 1 if fail_on is "slower" and something is. Raises ValueError."""
    comparison = report_compare.compare(read(old), read(new))
    if as_json:
        print(json.dumps(comparison, indent=1, allow_nan=False))
    else:
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
        for table in report_compare.tables(comparison, verbose):
            console.print(table)
        for line in [*comparison["origins"], *report_compare.sentences(comparison)]:
            console.print(line, markup=False)
    slower = any(row["flag"] == report_compare.SLOWER for row in comparison["rows"])
    return int(fail_on == "slower" and slower)
