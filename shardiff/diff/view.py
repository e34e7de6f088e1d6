"""A diff for people: a table in phases with bars of bytes, and one picture for a strategy on several targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardiff.diff.record_view import times
from shardiff.diff.rules import WHY, Row, sentence
from shardiff.record import PHASES, Record
from shardiff.system.words import size

if TYPE_CHECKING:
    from rich.console import RenderableType


BAR = 14  # columns of the longest bar
# Okabe and Ito's colours, which colour-blind readers can tell apart (jfly.uni-koeln.de/color).
COLOURS = {
    "all_gather": "#0072B2",
    "reduce_scatter": "#E69F00",
    "all_reduce": "#D55E00",
    "collective_permute": "#009E73",
    "all_to_all": "#CC79A7",
}
OTHER = "#999999"


def describe(records: Sequence[Record], with_async: bool = True) -> str:
    """Equal records in one line: `3 x all_gather 1.05 MB bfloat16 (1 async)`."""
    alike: dict[str, list[Record]] = {}
    for r in records:
        often = "" if times(r) == "1" else f" {times(r)} times"
        text = f"{r.op} {size(r.payload_bytes)}{often}" + ("" if r.dtype.startswith("float32") else f" {r.dtype}")
        alike.setdefault(text, []).append(r)
    lines = []
    for text, group in alike.items():
        count = sum(r.is_async for r in group)
        note = f" ({count} async)" if 0 < count < len(group) else " async" if count else ""
        lines.append((f"{len(group)} x " if len(group) > 1 else "") + text + (note if with_async else ""))
    return "\n".join(lines) or "-"


def phase_of(row: Row, explicit: Sequence[Record], derived: Sequence[Record]) -> str:
    """The phase under which a row is shown: that of what was written, the earliest if there are several."""
    records = [explicit[i] for i in row.explicit] or [derived[j] for j in row.derived]
    return min((record.phase for record in records), key=PHASES.index)


def render(
    explicit: Sequence[Record], derived: Sequence[Record], rows: Sequence[Row], left: str, right: str
) -> list[RenderableType]:
    """The table of rows, alike ones in one line."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        ours, theirs = [explicit[i] for i in row.explicit], [derived[j] for j in row.derived]
        kinds = (describe(ours, with_async=False), describe(theirs, with_async=False))
        key = (phase_of(row, explicit, derived), *kinds, row.verdict, row.rules)
        alike.setdefault(key, []).append(row)
    most = max([sum(max(row.bytes.values()) for row in group) for group in alike.values()] + [1])

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("phase", left, right, "verdict"):
        table.add_column(escape(name), overflow="fold")
    table.add_column("wire bytes", no_wrap=True)
    shown = None
    for phase in PHASES:
        for (where, _, _, verdict, rules), group in alike.items():
            if where != phase:
                continue
            ours = [explicit[i] for row in group for i in row.explicit]
            theirs = [derived[j] for row in group for j in row.derived]
            sums = [sum(row.bytes[key] for row in group) for key in ("explicit", "derived")]
            colour = {"same": "green", "rewritten": "yellow"}.get(verdict, "red")
            text = verdict if verdict == "same" or not rules else ", ".join(rules).replace("_", " ")
            sides = escape(describe(ours)), escape(describe(theirs))
            cells = (phase if phase != shown else "", *sides, f"[{colour}]{escape(text)}[/]")
            table.add_row(*cells, "\n".join(bar(amount, most) for amount in sums))
            shown = phase
    return [table]


def bar(amount: int, most: int) -> str:
    """A bar and its number."""
    length = amount / most * BAR
    full, part = int(length), " ▏▎▍▌▋▊▉"[int(length % 1 * 8)]
    return f"{('█' * full + part).strip().ljust(BAR)} {size(amount):>8}"


def rule_notes(rows: Sequence[Row], explicit: Sequence[Record], derived: Sequence[Record]) -> str:
    """A sentence for each rule that was used, and what no rule explains."""
    lines = []
    for rule in WHY:
        for row in (row for row in rows if rule in row.rules):
            ours, theirs = [explicit[i] for i in row.explicit], [derived[j] for j in row.derived]
            lines.append(f"{rule.replace('_', ' ')}: {sentence(rule, ours, theirs)}.")
    lines += [f"{row.verdict}: {row.why}." for row in rows if row.verdict.startswith("only")]
    return "\n".join(dict.fromkeys(lines))
