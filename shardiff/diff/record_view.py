"""Records of communication for people: a table in phases, and numbers that can be read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardiff.record import PHASES, Record, totals
from shardiff.system.words import size

if TYPE_CHECKING:
    from rich.table import Table


def times(record: Record) -> str:
    """How often it runs in a step: 7, 0..1, or 2.. where there is no upper bound."""
    least, most = record.executions.min, record.executions.max
    return str(least) if least == most else f"{least}..{'' if most is None else most}"


def operation(record: Record, usual: bool = False) -> str:
    """The op, and what else decides its result: `all_reduce(max)`, `broadcast(root 1)`.

    usual: say so also where that is a sum, or root 0.
    """
    root = None if record.root is None else f"root {record.root}"
    more = root if record.reduction is None else record.reduction
    return record.op if more is None or more in ("sum", "root 0") and not usual else f"{record.op}({more})"


def group(record: Record) -> str:
    """Among whom: `8`, `2 of 4: 0-3 4-7` for two groups of four, `tp 2 of 4` where the axis has a name, or edges."""
    if record.edges is not None:
        shown = " ".join(f"{source}>{target}" for source, target in record.edges[:4])
        return f"{shown} +{len(record.edges) - 4}" if len(record.edges) > 4 else shown
    if record.group_size is None:
        return "?"
    count = len(record.groups or ())
    text = f"{count} of {record.group_size}" if count > 1 else str(record.group_size)
    if record.axis:
        return f"{record.axis} {text}"
    return f"{text}: {members(record, 2)}" if count > 1 else text  # or groups over two axes would look alike


def members(record: Record, most: int = 4) -> str:
    """Who takes part: `tp 0-3`, `dp 0,2 1,3`, `0>1 1>2`. Cut off where it is long."""
    if record.edges is not None:
        texts = [f"{source}>{target}" for source, target in record.edges]
    else:
        texts = [_ranks(ranks) for ranks in record.groups or ()]
    more = [f"... {len(texts) - most} more"] if len(texts) > most else []
    return " ".join([*([record.axis] if record.axis else []), *texts[:most], *more])


def _ranks(ranks: Sequence[int]) -> str:
    """The ranks of one group: `0-3`, `0,2`, and where there are many with one stride between them `0,4,...,28`."""
    strides = {b - a for a, b in zip(ranks, ranks[1:], strict=False)}
    if len(ranks) > 2 and strides == {1}:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 4 and len(strides) == 1:
        return f"{ranks[0]},{ranks[1]},...,{ranks[-1]}"
    return ",".join(map(str, ranks))


def place(source: str | None) -> str:
    """file:line, relative to the current directory where it lies below."""
    if not source:
        return ""
    below = os.getcwd() + os.sep
    return source.removeprefix(below) if source.startswith(below) else os.sep.join(source.split(os.sep)[-3:])


def table(records: Sequence[Record], by_rank: bool = False) -> Table:
    """One line for each kind of record, in phases; alike ones counted.

    by_rank: for a program whose ranks mean something to the reader: which they are, not how many, and what they send.
    """
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    result = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    what = by_rank and any(record.detail for record in records)
    for name in (
        "phase",
        "n",
        "op",
        "payload",
        "wire",
        "type",
        "group",
        "times",
        "source",
        *(["what"] if what else []),
    ):
        right = name in ("n", "payload", "wire", "times")
        result.add_column(name, justify="right" if right else "left", overflow="fold")
    shown = None
    for phase in PHASES:
        lines: dict[tuple[str, ...], int] = {}
        for r in (r for r in records if r.phase == phase):
            op = " ".join([operation(r), *(["async"] if r.is_async else []), *r.flags])
            among = members(r) if by_rank else group(r)
            cells = (op, size(r.payload_bytes), size(r.wire_bytes), r.dtype, among, times(r), place(r.source))
            cells = (*cells, r.detail or "") if what else cells
            lines[cells] = lines.get(cells, 0) + 1
        for cells, count in lines.items():
            result.add_row(phase if phase != shown else "", str(count) if count > 1 else "", *map(escape, cells))
            shown = phase
    return result


def summary(records: Sequence[Record]) -> str:
    """The totals of a step in one line."""
    if not records:
        return "no communication"
    sums = totals(records)

    def span(key: str, number: bool = False) -> str:
        least, most = sums[key]["min"], sums[key]["max"]
        low = str(least) if number else size(least)
        if least == most:
            return low
        return f"{low} or more" if most is None else f"{low} to {most if number else size(most)}"

    calls, payload, wire = span("calls", number=True), span("payload_bytes"), span("wire_bytes")
    return f"in one step: {calls} call{'' if calls == '1' else 's'}, payload {payload}, a rank sends {wire}"
