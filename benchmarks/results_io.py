"""Results on disk: read back and judged, written so that they are whole at every moment.

A result is what one section of a report shows: a document of plain JSON types with its machine, as `shardiff check
--json` and `shardiff bench ...` make them; "diff" is that of `benchmarks.report_run`. A report's file holds several.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.inputs import NotJson, one_line, read_json

SECTIONS = ("check", "diff", "collectives", "steps", "bubbles")
SCHEMA = 1
FACTS = ("os", "cpu", "cores", "memory_bytes", "gpus", "python", "versions", "commit", "date")  # of machine.facts

Document = dict[str, Any]


class NoResult(ValueError):
    """A file of something else."""


def read(path: Path) -> dict[str, Document]:
    """Section -> document, of a file, or of all files in a directory that are results: the latest of each section.

    Raises ValueError, one line, for what cannot be read or is no result.
    """
    if not path.is_dir():
        return read_file(path)
    found: dict[str, Document] = {}
    for file in sorted(path.glob("*.json")):
        with suppress(NoResult):
            for section, document in read_file(file).items():
                found[section] = max(found.get(section, document), document, key=lambda one: one["machine"]["date"])
    if not found:
        raise NoResult(f"{path}: no result of shardiff in this directory")
    return {section: found[section] for section in SECTIONS if section in found}


def read_file(path: Path) -> dict[str, Document]:
    """Section -> document, of one file."""
    try:
        content = read_json(path)
    except NotJson as error:
        raise NoResult(str(error)) from None
    kind = kind_of(content)
    if kind is None:
        raise NoResult(f"{path}: no result of shardiff check --json, bench or report")
    if content.get("schema", SCHEMA) != SCHEMA:
        version = one_line(content["schema"])[:40]
        raise ValueError(f"{path}: version {version} of {kind}; this shardiff reads version {SCHEMA}")
    documents = content.get("sections") if kind == "report" else {kind: content}
    if not isinstance(documents, dict) or not documents.keys() <= set(SECTIONS):
        raise ValueError(f"{path}: a report with sections other than {', '.join(SECTIONS)}")
    for section, document in documents.items():
        if flaw := broken(section, document):
            raise ValueError(f"{path}: not a whole result of {section}: {flaw}")
    return {section: documents[section] for section in SECTIONS if section in documents}


def kind_of(content: Any) -> str | None:
    """A section, or "report"; None for what is not ours."""
    if not isinstance(content, dict):
        return None
    kind = content.get("kind")
    if kind is None and "machine" in content and isinstance(content.get("rows"), list):
        return "check" if all(isinstance(row, dict) and "loss_error" in row for row in content["rows"]) else None
    return kind if kind in (*SECTIONS, "report") else None


def broken(section: str, document: Any) -> str | None:
    """What is wrong in a document; None if it can be shown."""
    from benchmarks import results_schema
    from benchmarks.report_compare import figures
    from benchmarks.report_sections import blocks, summary

    if isinstance(document, dict) and document.get("kind", section) != section:
        return f"it is one of {one_line(document['kind'])[:40]}"
    if flaw := results_schema.broken(section, document):
        return flaw
    try:  # what no schema says: indices without records, settings that do not fit each other
        figures(section, document)
        summary(section, document)
        blocks(section, document, pictures=False)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        return one_line(f"{type(error).__name__} {error}")[:200]
    return None


def same_origin(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two machines (`machine.facts`) are one, with the same versions and the same, unchanged commit."""
    parts = [name for name in FACTS if name != "date"]
    return all(a[name] == b[name] for name in parts) and not str(a["commit"]).endswith("+")


def write(path: Path, content: bytes | str | Document) -> None:
    """Replace a file at once: text, bytes, or a document as JSON. Raises OSError, and the old file stays as it is."""
    target = Path(os.path.realpath(path))  # of a link, what it leads to is replaced
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".shardiff-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(encoded(content))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def encoded(content: bytes | str | Document) -> bytes:
    """As it stands in a file."""
    if isinstance(content, dict):
        content = as_lines(content)
    return content.encode() if isinstance(content, str) else content


def as_lines(document: Document) -> str:
    """JSON with a line for each key, and for each element of a list that is a value: a timeline takes one."""

    def value(of: Any) -> str:
        if isinstance(of, list) and of:
            return "[\n  " + ",\n  ".join(json.dumps(one, allow_nan=False) for one in of) + "\n ]"
        return json.dumps(of, allow_nan=False)

    return "{\n " + ",\n ".join(f"{json.dumps(key)}: {value(of)}" for key, of in document.items()) + "\n}\n"


def unwritable(path: Path) -> str | None:
    """Why no file can be written there, by writing one beside it; None if it can."""
    try:
        with suppress(FileNotFoundError):
            path.lstat()  # refuses names that are too long
        with tempfile.NamedTemporaryFile(dir=Path(os.path.realpath(path)).parent, prefix=".shardiff-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def keeper(path: Path | None) -> Callable[[bytes | str | Document], bool]:
    """A function that writes what must not be lost, and returns whether it is where it should be.

    Where `path` cannot be written (a disk became full) it goes to the temporary directory from then on, and one line on
    standard error says where; where that fails too, to standard error itself once nothing else is left to try.
    """
    places = [] if path is None else [path, Path(tempfile.gettempdir(), f"shardiff-{os.getpid()}-{path.name}")]

    def keep(content: bytes | str | Document) -> bool:
        while places:
            try:
                write(places[0], content)
                return places[0] == path
            except OSError as error:
                failed = places.pop(0)
                then = f"; it goes to {places[0]}" if places else ""
                print(f"shardiff: {failed}: cannot be written: {error.strerror}{then}", file=sys.stderr)
        return path is None

    return keep
