"""A program's communication in the formats that other tools read. Each function returns text."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from shardiff.record import Record
from shardiff.summary import times
from shardiff.system.words import size

COLUMNS = ("phase", "op", "reduction", "dtype", "payload_bytes", "wire_bytes", "axis", "group_size", "groups", "edges")
COLUMNS = (*COLUMNS, "calls", "source", "detail")


def row(record: Record) -> list[str]:
    """A record's cells, for COLUMNS."""
    groups = ";".join(" ".join(map(str, group)) for group in record.groups or ())
    edges = ";".join(f"{source}>{target}" for source, target in record.edges or ())
    cells = {"groups": groups, "edges": edges, "calls": times(record)}
    values = [cells.get(name, getattr(record, name, None)) for name in COLUMNS]
    return ["" if value is None else str(value) for value in values]


def as_csv(records: Sequence[Record]) -> str:
    """A line for each record, with a header; groups and edges are separated by semicolons."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(map(row, records))
    return out.getvalue()


def as_markdown(records: Sequence[Record], title: str, problems: Sequence[str] = ()) -> str:
    """A table for a pull request."""
    lines = [f"### {title}", "", "| phase | op | calls | payload | wire | axis | source | what |"]
    lines.append("|---|---|--:|--:|--:|---|---|---|")
    for r in records:
        cells = (r.phase, r.op, f"{times(r):,}", size(r.payload_bytes), size(r.wire_bytes), r.axis or "")
        cells = (*cells, r.source or "", r.detail or "")
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, *([""] if problems else []), *(f"- **{problem}**" for problem in problems), ""])


def as_github(errors: Sequence[str], warnings: Sequence[str], notice: str) -> str:
    """Annotations of a GitHub workflow: each at the first line of a file that its text names."""
    lines = [_annotation(kind, text) for kind, texts in (("error", errors), ("warning", warnings)) for text in texts]
    return "\n".join([*lines, _annotation("notice", notice), ""])


def _annotation(kind: str, text: str) -> str:
    place = re.search(r"([\w./\\-]+\.py):(\d+)", text)
    where = f" file={_property(place[1])},line={place[2]}" if place else ""
    return f"::{kind}{where}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_junit(name: str, checks: dict[str, list[str]]) -> str:
    """A test suite for a CI: a case for each check, which fails with these lines."""
    failures = sum(1 for lines in checks.values() if lines)
    cases = []
    for check, lines in checks.items():
        head = f"  <testcase classname={quoteattr(_printable(name))} name={quoteattr(_printable(check))}"
        if not lines:
            cases.append(f"{head}/>")
        else:
            first, text = quoteattr(_printable(lines[0])), escape(_printable("\n".join(lines)))
            cases.append(f"{head}>\n    <failure message={first}>{text}</failure>\n  </testcase>")
    suite = f'<testsuite name={quoteattr(_printable(name))} tests="{len(checks)}" failures="{failures}">'
    return "\n".join(['<?xml version="1.0" encoding="utf-8"?>', suite, *cases, "</testsuite>", ""])


def _printable(text: str) -> str:
    """Without what XML cannot hold."""
    return "".join(c if c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" else "?" for c in text)
