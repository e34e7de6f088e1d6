"""Resuming an interrupted benchmark: the blocks that it has finished are kept if everything else is the same.

A document has "runs": [{"date", "blocks"}], which say of every block in which run it was measured, so that figures of
several runs are never mixed without a word.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.documents.fields import Block
from benchmarks.documents.results_io import FACTS, read_file
from shardiff.system.inputs import one_line

Document = dict[str, Any]


def earlier(path: Path, started: Document) -> Document | None:
    """The document in `path` of an earlier run with the same settings and machine, versions and commit; None if there
    is no file. started: the new run's document, still without results.

    Raises ValueError, one line, that names what differs, or what cannot be read.
    """
    if not path.exists():
        return None
    kind = started["kind"]
    found = read_file(path).get(kind)
    if found is None or "runs" not in found:
        raise ValueError(f"{path}: no result of shardiff bench {kind} that can be resumed")
    new = json.loads(json.dumps(started))
    old = {"": found["settings"], "machine's ": found["machine"]}
    keys = {"": [*new["settings"]], "machine's ": [fact for fact in FACTS if fact != "date"]}
    for whose, now in (("", new["settings"]), ("machine's ", new["machine"])):
        for key in keys[whose]:
            if old[whose].get(key) != now[key]:
                was, is_now = (_shown(side.get(key)) for side in (old[whose], now))
                raise ValueError(f"{path}: {whose}{key} was {was}, now it is {is_now}: run without --resume")
    if str(new["machine"]["commit"]).endswith("+"):
        raise ValueError(f"{path}: the checkout has changes, so it may not be the same code: run without --resume")
    return found


def _shown(value: Any) -> str:
    text = one_line(json.dumps(value))
    return text if len(text) <= 60 else f"{text[:60]}..."


def begin(document: Document, kept: Document | None) -> None:
    """Give a document the runs that its blocks come from: those of `kept`, and this one, still without any."""
    runs = [dict(run) for run in kept["runs"]] if kept else []
    document["runs"] = [*runs, {"date": document["machine"]["date"], "blocks": []}]


def has(kept: Document | None, block: str) -> bool:
    """Whether a block is in an earlier document."""
    return kept is not None and any(block in run["blocks"] for run in kept["runs"])


def measured(document: Document, block: str) -> None:
    """Note that this run has finished a block."""
    document["runs"][-1]["blocks"].append(block)


def sentence(runs: Sequence[Block]) -> str | None:
    """Which runs the blocks come from, where there are several."""
    counts = Counter({run.date: len(run.blocks) for run in runs if run.blocks})
    if len(counts) < 2:
        return None
    each = ", ".join(f"{count} on {date[:16].replace('T', ' ')} UTC" for date, count in counts.items())
    return f"Resumed: the blocks come from {len(counts)} runs, {each}; the file says which."
