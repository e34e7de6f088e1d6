"""Results on disk: read back, and parsed into the types that the views and the report show.

A result is what one section of a report shows: a document of plain JSON types with its machine, as `shardiff check
--json` and `shardiff bench ...` make them; "diff" is that of `benchmarks.report.run`. A report's file holds several.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchmarks.documents.bubbles import Bubbles
from benchmarks.documents.check import Check
from benchmarks.documents.collectives import Collectives
from benchmarks.documents.diff import Diffs
from benchmarks.documents.experts import Imbalance
from benchmarks.documents.fields import NAME, Machine, Result
from benchmarks.documents.gpu import Gpu
from benchmarks.documents.steps import Steps
from shardiff.system.files import Document
from shardiff.system.inputs import NotJson, one_line, read_json

Section = Check | Diffs | Collectives | Steps | Bubbles | Imbalance | Gpu
SECTIONS: dict[str, type[Section]] = {
    "check": Check,
    "diff": Diffs,
    "collectives": Collectives,
    "steps": Steps,
    "bubbles": Bubbles,
}
# A report shows what `bench experts` and `make gpu` have written, and does not measure it.
KINDS: dict[str, type[Section]] = {**SECTIONS, "experts": Imbalance, "gpu": Gpu}
SCHEMA = 1
T = TypeVar("T", bound=Result)
FACTS = tuple(Machine.__struct_fields__)


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
    return {section: found[section] for section in KINDS if section in found}


def read_file(path: Path) -> dict[str, Document]:
    """Section -> document, of one file; every document can be parsed."""
    try:
        content = read_json(path)
    except NotJson as error:
        raise NoResult(str(error)) from None
    kind = kind_of(content)
    if kind is None:
        raise NoResult(f"{path}: not a result of shardiff check --json, bench or report")
    if content.get("schema", SCHEMA) != SCHEMA:
        version = one_line(content["schema"])[:40]
        raise ValueError(f"{path}: {kind} has schema {version}; this shardiff reads schema {SCHEMA}")
    documents = content.get("sections") if kind == "report" else {kind: content}
    if not isinstance(documents, dict) or not documents.keys() <= KINDS.keys():
        raise ValueError(f"{path}: a report whose sections are not among {', '.join(KINDS)}")
    for section, document in documents.items():
        try:
            parse(section, document)
        except ValueError as error:
            raise ValueError(f"{path}: not a valid result of {section}: {error}") from None
    return {section: documents[section] for section in KINDS if section in documents}


def kind_of(content: Any) -> str | None:
    """A section, or "report"; None for what is not ours."""
    if not isinstance(content, dict):
        return None
    kind = content.get("kind")
    if kind is None and "machine" in content and isinstance(content.get("rows"), list):  # check, before it had a kind
        return "check" if all(isinstance(row, dict) and "loss_error" in row for row in content["rows"]) else None
    return kind if kind in (*KINDS, "report") else None


def parse(section: str, document: Any) -> Section:
    """A document as the type of its section. Raises ValueError, one line, that says where it does not fit."""
    if isinstance(document, dict) and document.get("kind", section) != section:
        raise ValueError(f"it is one of {one_line(document['kind'])[:40]}")
    return parse_as(KINDS[section], document)


def parse_as(of: type[T], document: Any) -> T:
    """The same, for who knows the section."""
    try:
        return msgspec.convert(document, of)
    except msgspec.ValidationError as error:
        raise ValueError(explained(str(error))) from None


def parsed(documents: Mapping[str, Document]) -> dict[str, Section]:
    """The same documents as the types of their sections. Raises ValueError, as `parse` does."""
    return {section: parse(section, document) for section, document in documents.items()}


def explained(message: str) -> str:
    """A message of msgspec's in one line: where the document does not fit, and why."""
    what, _, where = message.partition(" - at `")
    where = re.sub(r"^(key in |value in )?`?\$\.?", "", where.removesuffix("`")) or "it"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        return f"{where} has no {missing[1]}"
    name = "one line of at most 200 letters, digits, spaces and .,:;+=()/%-"
    what = what.replace(f"`str` matching regex {NAME!r}", name)
    what = re.sub(r"`str` matching regex '\^\(\?:([^)]*)\).*'$", lambda names: names[1].replace("|", " or "), what)
    return one_line(f"{where}: {what[:1].lower()}{what[1:]}".replace("`", ""))[:300]


def same_origin(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two machines (`machine.facts`) are one, with the same versions and the same, unchanged commit."""
    parts = [name for name in FACTS if name != "date"]
    return all(a[name] == b[name] for name in parts) and not str(a["commit"]).endswith("+")
