"""The comparison of two results for people: tables, and sentences below them."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from benchmarks import terminal
from benchmarks.report.compare import SLOWER, Document
from benchmarks.words import counted, duration
from shardiff.system.words import size

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST = 40  # lines of a table that has every figure


def parts(comparison: Document, complete: bool) -> list[RenderableType]:
    """All that is printed. complete: every figure, also where there are more than MOST."""
    return [*tables(comparison, complete), *comparison["origins"], *sentences(comparison)]


def tables(comparison: Document, complete: bool) -> list[RenderableType]:
    """A table for each section and setting."""
    from rich.markup import escape

    groups: dict[tuple[str, str], list[Document]] = {}
    for row in comparison["rows"]:
        groups.setdefault((row["section"], row["setting"]), []).append(row)
    result: list[RenderableType] = []
    for (section, setting), rows in groups.items():
        shown = rows if complete or len(rows) <= MOST else [row for row in rows if row["flag"]]
        title = escape(f"{section}: {setting}")
        made = terminal.table(["figure"], ["old", "new", "new / old", "outside both spreads"], title, gap=2)
        made.columns[0].overflow, made.columns[0].no_wrap = "fold", False
        made.columns[-1].justify = "left"
        for row in shown:
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
            colour = {SLOWER: "red", "faster": "green"}.get(row["flag"], "yellow")
            flag = f"[{colour}]{row['flag']}[/]" if row["flag"] else ""
            made.add_row(escape(row["figure"]), *(number(row[key], row["unit"]) for key in ("old", "new")), ratio, flag)
        if len(shown) < len(rows):
            made.caption = f"{len(rows) - len(shown)} more are not flagged; --verbose shows them"
            made.caption_justify = "left"
        result.append(made)
    return result


def number(value: float, unit: str) -> str:
    """A figure with its unit."""
    if unit == "s":
        return duration(value)
    if unit == "bytes":
        return size(value)
    if unit == "FLOP/s":
        return f"{value / 1e9:.3g} GFLOP/s"
    return f"{value:.1%}" if unit == "share" else f"{value:.3g} {unit if unit != 'error' else ''}".strip()


def sentences(comparison: Document) -> list[str]:
    """What a reader wants to know first, about each section."""
    lines = []
    for section in dict.fromkeys(row["section"] for row in comparison["rows"]):
        rows = [row for row in comparison["rows"] if row["section"] == section]
        flags = [row["flag"] for row in rows if row["flag"]]
        counts = ", ".join(f"{flags.count(flag)} {flag}" for flag in dict.fromkeys(flags)) or "none outside the spreads"
        times = [row["ratio"] for row in rows if row["unit"] == "s" and row["ratio"] and row["ratio"] > 0]
        middle = f"; the median of new / old is {statistics.median(times):.2f} for times" if times else ""
        lines.append(f"{section}: {counted(len(rows), 'figure')}, {counts}{middle}.")
    for key, name in (("only_old", "old"), ("only_new", "new")):
        if comparison[key]:
            count = counted(len(comparison[key]), "figure is", "figures are")
            lines.append(f"{count} in the {name} result only.")
    return lines or ["The two results have no figure in common."]
