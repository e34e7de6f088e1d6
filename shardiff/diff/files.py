"""The diff of two files of records."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardiff.diff.rules import Row, align, unexplained
from shardiff.record import Record, totals
from shardiff.system.inputs import NotJson, read_json


def side(records: Sequence[Record]) -> dict[str, Any]:
    """Records and their totals, in plain JSON types."""
    return {"records": [record.to_json() for record in records], "totals": totals(records)}


def read_records(path: Path) -> tuple[str, list[Record]]:
    """The records in an output of `shardiff trace --json` or `shardiff hlo --json`.

    Returns what the records are of, and them. Raises ValueError, one line that names the file, for anything else.
    """
    try:
        data = read_json(path)
    except NotJson as error:
        raise ValueError(f"{error}; give the JSON of one program, as shardiff trace or hlo print with --json") from None
    if isinstance(data, dict) and isinstance(data.get("records"), list):
        try:
            name = data.get("program") or data.get("module") or path
            return str(name), [Record.from_json(fields) for fields in data["records"]]
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    raise ValueError(f"{path}: has no records; give an output of shardiff trace or hlo --json")


def show_files(a: Path, b: Path, fail_on: str | None, as_json: bool) -> int:
    """The diff of two files of records; returns as `show` does. Raises ValueError for what is no such file."""
    (left, explicit), (right, derived) = read_records(a), read_records(b)
    rows = align(explicit, derived)
    if as_json:
        document = {
            "strategy": None,
            "implementation": None,
            "target": None,
            "mesh": None,
            "explicit": {"file": str(a), "program": left, **side(explicit)},
            "derived": {"file": str(b), "program": right, **side(derived)},
            "closed_form": None,
            "rows": [row.to_json() for row in rows],
            "unexplained": unexplained(rows),
        }
        print(json.dumps(document))
        return int(fails(rows, fail_on))
    from rich.console import Console

    from shardiff.diff import record_view
    from shardiff.diff import view as diff_view

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)
    for part in diff_view.render(explicit, derived, rows, a.name, b.name):
        console.print(part)
    for name, records in ((a, explicit), (b, derived)):
        console.print(f"{name}: {record_view.summary(records)}", markup=False)
    console.print(diff_view.rule_notes(rows, explicit, derived), markup=False)
    return int(fails(rows, fail_on))


def fails(rows: Sequence[Row], fail_on: str | None) -> bool:
    """Whether the rows have what must not be: rows that no rule explains, or more wire bytes than were written."""
    if fail_on == "extra-bytes":
        return sum(row.bytes["derived"] - row.bytes["explicit"] for row in rows) > 0
    return fail_on == "unexplained" and unexplained(rows) > 0
