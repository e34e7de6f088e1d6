"""Baselines: what programs communicated before, in a file beside the code, to compare with from then on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardiff.program import Program
from shardiff.record import Record, totals
from shardiff.system import files
from shardiff.system.inputs import read_json

SCHEMA = 1
HOW = "a baseline is a file that --update-baseline or pytest --update-communication has written"


def check(path: Path | None, names: Iterable[str], update: bool) -> None:
    """Raises ValueError, one line, unless the file has these programs, or can be written where it is to be updated."""
    if path is None:
        if update:
            raise ValueError("--update-baseline needs --baseline FILE.json, the file to write")
    elif update:
        files.check_path("baseline", path, ".json")
        if path.exists():
            read(path)
    elif not path.is_file():
        raise ValueError(f"{path}: no such baseline; write it with --update-baseline")
    else:
        kept = read(path)
        if missing := [name for name in names if name not in kept]:
            raise ValueError(f"{path}: has nothing for {missing[0]}; write it with --update-baseline")


def write(path: Path, programs: Mapping[str, Program]) -> None:
    """Replace the file by these programs, each under its name. Raises OSError, and the old file stays as it is.

    Sources are left out, and names that the compiler gave: they change with every edit of the code.
    """
    kept = {name: {"records": [kept_of(record) for record in p], "totals": totals(p)} for name, p in programs.items()}
    files.write(path, {"schema": SCHEMA, "programs": kept})


def update(path: Path, programs: Mapping[str, Program]) -> None:
    """Replace these programs in the file, and keep the others that it has. Raises as `write` and `read` do."""
    write(path, {**(read(path) if path.exists() else {}), **programs})


def kept_of(record: Record) -> dict[str, Any]:
    """A record in plain JSON types, without what changes when nothing about the communication does."""
    fields = record.to_json()
    for name in ("source", "name", "computation"):
        fields.pop(name, None)
    return fields


def read(path: Path) -> dict[str, Program]:
    """The programs of a baseline by their names. Raises ValueError, one line that names the file."""
    data = read_json(path)
    programs = data.get("programs") if isinstance(data, dict) else None
    if not isinstance(programs, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"{path}: no baseline of schema {SCHEMA}: {HOW}")
    found = {}
    for name, fields in programs.items():
        if not isinstance(fields, dict) or not isinstance(fields.get("records"), list):
            raise ValueError(f"{path}: {name} has no records: {HOW}")
        try:
            found[name] = Program(tuple(map(Record.from_json, fields["records"])), f"{name} in {path.name}")
        except ValueError as error:
            raise ValueError(f"{path}: {name}: {error}") from None
    return found
