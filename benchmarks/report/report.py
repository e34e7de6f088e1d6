"""What `shardiff report` makes: all results in one HTML file, in Markdown and in JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bubbles.timeline import chrome_trace
from benchmarks.bubbles.view import titled
from benchmarks.documents.bubbles import Bubbles
from benchmarks.documents.results_io import KINDS, SCHEMA, SECTIONS, parse, read
from benchmarks.documents.results_io import Section as Result
from benchmarks.report import html, markdown
from benchmarks.report import run as report_run
from benchmarks.report import sections as report_sections
from benchmarks.report.blocks import Block, Items, Section, Text, pictures
from shardiff.system import machine
from shardiff.system.files import Document, keeper, unwritable, write

TITLE = "shardiff: parallel training in torch.distributed and in JAX"


@dataclass(frozen=True)
class Plan:
    """What to report, and where. given: sections that are taken as they are; the others of `sections` are measured.

    fresh: measure anew what an earlier run has left in `output`. timeout: the commands' own option, by default theirs.
    """

    output: Path
    sections: Sequence[str] = tuple(SECTIONS)
    quick: bool = False
    given: Mapping[str, Document] = field(default_factory=dict)
    fresh: bool = False
    timeout: float | None = None


@dataclass(frozen=True)
class Report:
    """document: what report.json holds. results: its sections, parsed."""

    document: Document
    results: Mapping[str, Result]

    @property
    def failures(self) -> Mapping[str, str]:
        """Section -> why it is not complete."""
        return self.document["failures"]

    @property
    def holds(self) -> bool:
        """Whether everything that was compared is equal."""
        return all(one.holds for one in self.results.values())

    def lines(self) -> list[str]:
        """What the data says, in sentences, and what is not complete."""
        said = [line for lines in self.document["summary"].values() for line in lines]
        return [*said, *(f"{name} is not complete: {why}." for name, why in self.failures.items())]


def plan(
    output: Path,
    results: Sequence[Path],
    sections: Sequence[str],
    quick: bool,
    fresh: bool,
    timeout: float | None = None,
) -> Plan:
    """A Plan, with its output directory made. Raises ValueError in one line."""
    for section in sections:
        if section not in KINDS:
            raise ValueError(f"unknown section {section!r}; known: {', '.join(KINDS)}")
    given: dict[str, Document] = {}
    for path in results:
        given |= read(path)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{output}: {error.strerror}") from None
    if reason := unwritable(output / "report.json"):
        raise ValueError(f"{output}: cannot be written: {reason}")
    for section in sections:
        if section not in (*SECTIONS, *given):
            writer = {"gpu": "make gpu", "experts": "shardiff bench experts"}[section]
            raise ValueError(f"the section {section} is what {writer} writes: give its file, --results FILE.json")
    wanted = tuple(one for one in KINDS if (one in sections if sections else one in SECTIONS or one in given))
    return Plan(output, wanted, quick, given, fresh, timeout)


def gather(todo: Plan, tell: Callable[[str], object] = lambda line: None) -> Report:
    """Every section given, found or measured. What fails is named in the report, and the other sections follow.

    tell: called with a line about each section.
    """
    sections: dict[str, Document] = {}
    failures: dict[str, str] = {}
    for name in todo.sections:
        began = time.time()
        try:
            sections[name], how = _section(todo, name, tell)
        except report_run.Failed as error:
            failures[name], how = str(error), "failed"
            if partial := report_run.unfinished(name, todo.output, began):
                sections[name] = partial
        tell(f"{name}: {how}")
    results = {name: parse(name, document) for name, document in sections.items()}
    head = {"kind": "report", "schema": SCHEMA, "quick": todo.quick, "machine": machine.facts()}
    said = {name: report_sections.summary(one) for name, one in results.items()}
    return Report({**head, "summary": said, "failures": failures, "sections": sections}, results)


def _section(todo: Plan, name: str, tell: Callable[[str], object]) -> tuple[Document, str]:
    """A section and where it comes from. Raises report_run.Failed."""
    if name in todo.given:
        write(todo.output / f"{name}.json", todo.given[name])
        return todo.given[name], "given"
    line = report_run.command(name, todo.quick, todo.timeout)
    if not todo.fresh and (found := report_run.finished(name, line, todo.output)):
        return found, "measured before"
    tell(f"{name}: shardiff {line}")
    began = time.monotonic()
    document = report_run.measure(name, line, todo.output)
    try:
        parse(name, document)
    except ValueError as error:
        raise report_run.Failed(f"its result is not valid: {error}") from None
    return document, f"{time.monotonic() - began:.0f} s"


def write_all(report: Report, directory: Path) -> None:
    """report.json, report.md with its pictures, and report.html, which is written last."""
    top, chapters = content(report)
    version = machine.version("shardiff")
    foot = f"Written by shardiff {version}, {report.document['machine']['date'][:16].replace('T', ' ')} UTC."
    keeper(directory / "report.json")(report.document)
    (directory / "pictures").mkdir(exist_ok=True)
    for picture in [one for chapter in chapters for one in pictures(chapter.blocks)]:
        write(directory / "pictures" / f"{picture.name}.svg", picture.svg)
    for result in report.results.values():
        if isinstance(result, Bubbles):
            write(directory / "bubbles_trace.json", chrome_trace(titled(result)))
    write(directory / "report.md", markdown.page(TITLE, top, chapters, foot))
    write(directory / "report.html", html.page(TITLE, top, chapters, foot))


def content(report: Report) -> tuple[list[Block], list[Section]]:
    """What stands on top, and the chapters."""
    said: list[Any] = [line for lines in report.document["summary"].values() for line in lines]
    top: list[Block] = [Items(said)]
    if report.document["quick"]:
        text = "This is a quick report: small sizes and few iterations, to see what a report holds. Run"
        top.insert(0, Text(f"{text} shardiff report --full for figures to keep.", "warning"))
    if "check" in report.results:
        top.append(Text("The check is of an MLP; shardiff check --model transformer checks a transformer's blocks."))
    top += [Text(f"{name} is not complete: {why}.", "warning") for name, why in report.failures.items()]
    return top, [report_sections.section(*one) for one in report.results.items()]
