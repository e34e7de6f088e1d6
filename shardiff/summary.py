"""A program of many records at a glance: sums by axis, phase and op, what is largest, and which rank sends most."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardiff.program import Share, by_rank
from shardiff.record import PHASES, Record
from shardiff.system.words import size

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST = 5  # of the largest that are shown


@dataclass(frozen=True)
class Sum:
    """Of the records of one axis (or of one size of group, where no axis is known), phase and op: calls and bytes."""

    among: str
    phase: str
    op: str
    calls: int
    payload_bytes: int
    wire_bytes: int


@dataclass(frozen=True)
class Kind:
    """Records that differ in numbers of layers alone. record: the first; detail: with * for what differs; calls and
    bytes in all."""

    record: Record
    detail: str
    calls: int
    payload_bytes: int


@dataclass(frozen=True)
class Summary:
    """sums: in the order of phases, most bytes first. largest: the kinds with most bytes in all. busiest, idlest: the
    ranks that must send most and least; None where it is not known who takes part."""

    sums: list[Sum]
    largest: list[Kind]
    kinds: int
    busiest: Share | None
    idlest: Share | None


def times(record: Record) -> int:
    """How often it runs; where that is unknown, the least, and at least once."""
    return record.times


def among(record: Record) -> str:
    """The axis, or the size of the groups, or who exchanges messages."""
    if record.axis:
        return record.axis
    if record.edges is not None:
        return "messages"
    return f"groups of {record.group_size}" if record.group_size else "unknown groups"


def summarize(records: Iterable[Record]) -> Summary:
    """Of one program, or one step."""
    records = list(records)
    sums: dict[tuple[str, str, str], list[int]] = {}
    kinds: dict[tuple[object, ...], list[Record]] = {}
    for r in records:
        amounts = sums.setdefault((among(r), r.phase, r.op), [0, 0, 0])
        for i, amount in enumerate((1, r.payload_bytes, r.wire_bytes)):
            amounts[i] += times(r) * amount
        kinds.setdefault((r.op, r.dtype, r.payload_bytes, r.phase, among(r), folded(r.detail)), []).append(r)
    order = sorted(sums.items(), key=lambda item: (PHASES.index(item[0][1]), -item[1][1], item[0]))
    found = [
        Kind(
            same[0],
            folded(same[0].detail) if len({r.detail for r in same}) > 1 else same[0].detail or "",
            sum(map(times, same)),
            sum(times(r) * r.payload_bytes for r in same),
        )
        for same in kinds.values()
    ]
    shares = by_rank(records)
    return Summary(
        [Sum(*key, *amounts) for key, amounts in order],
        sorted(found, key=lambda kind: -kind.payload_bytes)[:MOST],
        len(found),
        max(shares, key=lambda share: (share.wire_bytes, -share.rank), default=None),
        min(shares, key=lambda share: (share.wire_bytes, share.rank), default=None),
    )


def folded(detail: str | None) -> str:
    """A detail without the numbers of its layers."""
    return re.sub(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])", "*", detail or "")


def calls_text(count: int) -> str:
    return f"{count:,} call{'s' * (count != 1)}"


def totals_text(summary: Summary) -> str:
    """Calls, payload, and what a rank must send, if anything; where ranks differ, the busiest and the idlest."""
    if not summary.sums:
        return "no communication"
    calls = calls_text(sum(each.calls for each in summary.sums))
    most, least = summary.busiest, summary.idlest
    if most is None or least is None:
        payload, wire = (sum(getattr(each, name) for each in summary.sums) for name in ("payload_bytes", "wire_bytes"))
        return f"{calls}, {size(payload)} payload, {size(wire)} that a rank must send"
    if most.wire_bytes == least.wire_bytes:
        return f"{calls}, {size(most.payload_bytes)} payload, {size(most.wire_bytes)} that a rank must send"
    return (
        f"{calls}, {size(most.payload_bytes)} payload of the busiest rank, {most.rank}, which must send "
        f"{size(most.wire_bytes)}; rank {least.rank} must send {size(least.wire_bytes)}"
    )


def view(summary: Summary) -> RenderableType:
    """For people: the sums, then what is largest."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    def table(*columns: str) -> Table:
        made = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
        for column in columns:
            right = column in ("calls", "payload", "wire", "each", "in all")
            made.add_column(column, justify="right" if right else "left", overflow="fold")
        return made

    sums = table("phase", "axis", "op", "calls", "payload", "wire")
    shown = ""
    for each in summary.sums:
        phase = "" if each.phase == shown else each.phase
        cells = (phase, each.among, each.op, f"{each.calls:,}", size(each.payload_bytes), size(each.wire_bytes))
        sums.add_row(*map(escape, cells))
        shown = each.phase
    largest = table("largest", "calls", "each", "in all", "what", "source")
    for kind in summary.largest:
        r = kind.record
        cells = (f"{r.phase} {r.op}", f"{kind.calls:,}", size(r.payload_bytes), size(kind.payload_bytes))
        largest.add_row(*map(escape, (*cells, kind.detail, r.source or "")))
    return Group(sums, largest)
