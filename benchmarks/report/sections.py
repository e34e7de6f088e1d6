"""The chapters of a report, from its results: sentences computed from them, tables and pictures.

The tables are those that the commands print.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.documents.bubbles import Bubbles
from benchmarks.documents.check import Check
from benchmarks.documents.collectives import Collectives
from benchmarks.documents.diff import Diffs
from benchmarks.documents.experts import Imbalance
from benchmarks.documents.gpu import Gpu
from benchmarks.documents.results_io import Section as Result
from benchmarks.documents.steps import Steps
from benchmarks.report import bubbles, check, collectives, diff, experts, gpu, steps
from benchmarks.report.blocks import Block, Section, Text
from benchmarks.report.pictures import Draw, drawn

TITLES: dict[type[Result], str] = {
    Check: "Every strategy equals the single-device reference",
    Diffs: "Communication as written and as derived",
    Collectives: "Bandwidth of collectives",
    Steps: "Training steps and their memory",
    Bubbles: "The bubble of a pipeline",
    Imbalance: "Popular experts",
    Gpu: "On a GPU",
}


def section(key: str, result: Result, draw: Draw = drawn) -> Section:
    """A result as a chapter."""
    shown: list[Block] = [Text(line) for line in summary(result)] + list(_BLOCKS[type(result)](result, draw))
    if not result.complete:
        shown.insert(0, Text("Partial: the measurement was not completed.", "warning"))
    return Section(key, TITLES[type(result)], shown, caption(result))


def caption(result: Result) -> str:
    """Machine, cores, versions, backend, commit, date, and the command where it is known."""
    facts = result.machine
    others = ", ".join(f"{name} {v}" for name, v in facts.versions.items() if v and name not in ("torch", "jax"))
    backend = {"cpu": "CPU processes over gloo", "cuda": "CUDA over NCCL"}.get(result.settings.device or "", "")
    commit = f"commit {facts.commit[:10]}{'+' * facts.commit.endswith('+')}" if facts.commit else ""
    date = f"{facts.date[:16].replace('T', ' ')} UTC"
    command = f"shardiff {result.command}" if result.command else ""
    return "; ".join(filter(None, (facts.summary(), facts.os, others, backend, commit, date, command)))


def summary(result: Result) -> list[str]:
    """What the data says, in sentences."""
    return list(_SUMMARIES[type(result)](result))


_SUMMARIES: dict[type[Result], Callable[[Any], Iterator[str]]] = {
    Check: check.summary,
    Diffs: diff.summary,
    Collectives: collectives.summary,
    Steps: steps.summary,
    Bubbles: bubbles.summary,
    Imbalance: experts.summary,
    Gpu: gpu.summary,
}
_BLOCKS: dict[type[Result], Callable[[Any, Draw], Iterator[Block]]] = {
    Check: check.blocks,
    Diffs: diff.blocks,
    Collectives: collectives.blocks,
    Steps: steps.blocks,
    Bubbles: bubbles.blocks,
    Imbalance: experts.blocks,
    Gpu: gpu.blocks,
}
