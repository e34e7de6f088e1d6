"""Compiled programs for people: what one communicates, what of it runs along each axis, and the memory of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardiff.diff.record_view import summary, table
from shardiff.program import Program
from shardiff.record import Record, totals
from shardiff.system.words import size

if TYPE_CHECKING:
    from rich.console import RenderableType

MEMORY = {
    "arguments": "arguments",
    "outputs": "outputs",
    "temporaries": "temporaries",
    "aliased": "of the outputs in the arguments' place",
    "generated_code": "code",
}


def by_axis(program: Program) -> dict[str, dict[str, Any]]:
    """Axis ("dp", "dp,tp", "" where the groups are no axis of the mesh) -> totals, in the order of the mesh's axes."""
    found: dict[str, list[Record]] = {}
    for record in program:
        found.setdefault(record.axis or "", []).append(record)
    names = program.mesh.names if program.mesh else ()
    order = sorted(found, key=lambda axis: (axis == "", axis.count(","), names.index(axis) if axis in names else 0))
    return {axis: totals(found[axis]) for axis in order}


def render(program: Program) -> list[RenderableType]:
    """The records, a line for each axis, the memory, and the totals."""
    from rich.text import Text

    parts: list[RenderableType] = []
    if program.records:
        parts += [table(program.records), axes_table(program)]
    if program.memory:
        parts.append(Text(f"memory of a device: {memory(program.memory)}"))
    return [*parts, Text(summary(program.records))]


def axes_table(program: Program) -> RenderableType:
    """A line for each axis that the program communicates along."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    result = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    result.add_column("axis")
    for name in ("ranks", "calls", "payload", "a rank sends"):
        result.add_column(name, justify="right")
    for axis, sums in by_axis(program).items():
        ranks = str(program.mesh.size_of(*axis.split(","))) if axis and program.mesh else ""
        spans = [span(sums["calls"], str), span(sums["payload_bytes"], size), span(sums["wire_bytes"], size)]
        result.add_row(axis or "no axis", ranks, *spans)
    return result


def span(bounds: dict[str, int | None], shown: Any) -> str:
    """The two ends of a total: one number where they agree."""
    least, most = bounds["min"], bounds["max"]
    if least == most:
        return shown(least)
    return f"{shown(least)} or more" if most is None else f"{shown(least)} to {shown(most)}"


def memory(amounts: dict[str, int]) -> str:
    """What a device holds, by kind."""
    return ", ".join(f"{size(amounts[kind])} {text}" for kind, text in MEMORY.items() if amounts.get(kind))
