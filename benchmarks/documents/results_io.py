"""Results on disk: read back and judged, written so that they are whole at every moment.

A result is what one section of a report shows: a document of plain JSON types with its machine, as `shardiff check
--json` and `shardiff bench ...` make them; "diff" is that of `benchmarks.report.run`. A report's file holds several.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardiff.system.files import Document
from shardiff.system.inputs import NotJson, one_line, read_json

SECTIONS = ("check", "diff", "collectives", "steps", "bubbles")
SCHEMA = 1
FACTS = ("os", "cpu", "cores", "memory_bytes", "gpus", "python", "versions", "commit", "date")  # of machine.facts


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
    from benchmarks.documents import results_schema
    from benchmarks.report.compare import figures
    from benchmarks.report.sections import blocks, summary

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
