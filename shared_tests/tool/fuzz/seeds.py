"""What is mutated: the cases of the tests, excerpts of real dumps, and documents of every kind."""

from __future__ import annotations

import contextlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

CASES = Path(__file__).parents[1] / "hlo_cases"
SMALL = 12_000  # bytes of the largest seed of text


@cache
def hlo_seeds() -> tuple[bytes, ...]:
    """The cases of the tests; of large ones, the header and some computations, with that of a collective first."""
    small = [file.read_bytes() for file in sorted(CASES.glob("[!b]*.hlo.txt"))]
    large = [excerpt(file.read_bytes()) for file in sorted(CASES.glob("real/*.hlo.txt"))]
    return tuple(seed for seed in [*small, *large] if seed)


def excerpt(text: bytes) -> bytes:
    """A large dump's header, its shortest computations, and the end of its ENTRY."""
    header, *computations = re.split(rb"\n(?=(?:ENTRY )?%\S+ \()", text)
    kept, size = [], 0
    for computation in sorted(computations[:-1], key=len):
        if (size := size + len(computation)) > SMALL // 2:
            break
        kept.append(computation)
    first, *lines = computations[-1].splitlines()
    communicating = [line for line in lines if re.search(rb" (all-|reduce-scatter|collective-|while|fusion)", line)]
    last = lines[-3:]
    return b"\n".join([header[:2000], *kept, first, *[line[:1000] for line in communicating[:12]], *last]) + b"\n"


@cache
def json_seeds() -> dict[str, tuple[Any, ...]]:
    """Documents of every kind that is read: "records" and "results"."""
    from shared_tests.bench import report_documents

    records = []
    for file in sorted(CASES.glob("*.hlo.txt")):
        with contextlib.suppress(ValueError):
            from shardiff.cli.hlo import to_json
            from shardiff.hlo import read_bytes

            records.append(to_json(file.name, read_bytes(file.read_bytes(), file.name)))
    traced = {
        "program": "train.py",
        "ranks": 2,
        "records": records[0]["records"],
        "totals": {},
        "disagreements": [],
    }
    results = list(report_documents.everything().values())
    report = {"kind": "report", "schema": 1, "quick": True, "machine": report_documents.MACHINE, "summary": {}}
    whole = {**report, "failures": {}, "sections": report_documents.everything()}
    made = {"records": [*records, traced], "results": [*results, whole]}
    return {kind: tuple(json.loads(json.dumps(one)) for one in many) for kind, many in made.items()}
