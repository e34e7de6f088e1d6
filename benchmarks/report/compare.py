"""Two results compared, figure by figure: `shardiff report A B`.

A figure is flagged if it lies outside of the other's spread, on both sides: the new value outside of the old quartiles
and the old value outside of the new ones. Spreads of collectives go from the minimum to the 99th percentile. Counts and
bytes have no spread and are flagged when they differ; what was measured once is not flagged.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.collectives.view import duration
from benchmarks.collectives.view import size as binary_size
from shardiff.system.words import size

if TYPE_CHECKING:
    from rich.console import RenderableType

Document = dict[str, Any]
MOST = 40  # lines of a table that has every figure
SLOWER = "slower"


@dataclass(frozen=True)
class Figure:
    """A number. spread: between what it varies; None if it is exact, (value, value) says nothing of that.
    unit: "s", "GB/s", "FLOP/s", "bytes", "share", "error" or "". better: 1 if more is better, -1 if less, else 0."""

    value: float
    unit: str
    spread: tuple[float, float] | None = None
    better: int = 0


Figures = dict[tuple[str, str], Figure]  # (what, setting)


def figures(section: str, document: Document) -> Figures:
    """All figures of a result that a comparison can be made of."""
    of = {"check": _check, "diff": _diff, "collectives": _collectives, "steps": _steps, "bubbles": _bubbles}[section]
    return {(what, setting): figure for what, setting, figure in of(document)}


def _check(document: Document) -> Iterator[tuple[str, str, Figure]]:
    for row in document["rows"]:
        name = f"{row['implementation']} {row['strategy']}"
        setting = (
            f"{row['mesh'].partition('=')[2] or 1} ranks, {row['dtype']}, {row['optimizer']}, {row['steps']} steps"
        )
        yield f"{name}: equal", setting, Figure(int(row["passed"]), "")
        for key in ("loss_error", "grad_error", "param_error"):
            if row[key] is not None:
                yield f"{name}: {key.replace('_', ' ')}", setting, _once(row[key], "error")


def _diff(document: Document) -> Iterator[tuple[str, str, Figure]]:
    setting = _sizes(document["settings"])
    for one in document["diffs"]:
        name = f"{one['strategy']} {one['implementation']} {one['target']}"
        for side, word in (("left", "written"), ("right", "derived")):
            yield f"{name}: wire bytes {word}", setting, Figure(one[side]["totals"]["wire_bytes"]["min"], "bytes")
        yield f"{name}: unexplained", setting, Figure(one["unexplained"], "")


def _collectives(document: Document) -> Iterator[tuple[str, str, Figure]]:
    setting = document["settings"]["transport"]
    for row in document["rows"]:
        what = f"{row['implementation']} {row['op']} {row['ranks']} ranks {binary_size(row['bytes'])}"
        mode = row["mode"].replace("_", " ")
        yield f"{what}: {mode}", setting, Figure(row["median_s"], "s", (row["min_s"], row["p99_s"]), -1)
    floor = document["floor"]
    if floor:
        yield "memory copy", setting, _once(floor["memory_copy_GBps"], "GB/s")
        for ranks, value in floor["loopback_GBps"].items():
            yield f"loopback, {ranks} streams", setting, _once(value, "GB/s")


def _steps(document: Document) -> Iterator[tuple[str, str, Figure]]:
    setting = f"{_sizes(document['settings'])}, {document['settings']['optimizer']}"
    for row in document["rows"]:
        name = f"{row['strategy']} {row['implementation']} {row['ranks']} ranks"
        for key in ("step", "compute", "exposed"):
            if row[f"{key}_seconds"]:
                yield f"{name}: {key}", setting, _spread(row[f"{key}_seconds"], "s", -1)
        for kind, count in row["memory"]["measured"].items():
            if count is not None:
                yield f"{name}: {kind.replace('_', ' ')}", setting, Figure(count, "bytes")
    for row in document["ratios"]:
        name = f"{row['strategy']} {row['ranks']} ranks: {row['of']} / {row['to']}"
        yield name, setting, _spread(row["ratio"], "", 0)
    for row in document["single_device"]:
        for key in ("matmul", "forward_backward"):
            name = f"single device {row['framework']} batch {row['batch']}: {key.replace('_', ' ')}"
            yield name, setting, _spread(row[f"{key}_flops_per_second"], "FLOP/s", 1)


def _bubbles(document: Document) -> Iterator[tuple[str, str, Figure]]:
    for row in document["rows"]:
        name = f"{row['implementation']} {row['stages']} stages {row['microbatches']} microbatches"
        yield f"{name}: bubble", _sizes(document["settings"]), _spread(row["measured"], "share", 0)
        yield f"{name}: step", _sizes(document["settings"]), _spread(row["step_seconds"], "s", -1)


def _spread(values: Mapping[str, float], unit: str, better: int) -> Figure:
    return Figure(values["median"], unit, (values["q1"], values["q3"]), better)


def _once(value: float, unit: str) -> Figure:
    return Figure(value, unit, (float("-inf"), float("inf")))


def _sizes(s: Mapping[str, Any]) -> str:
    return f"batch {s['batch']}, width {s['width']}, {s['layers']} layers, {s['dtype']}"


def compare(old: Mapping[str, Document], new: Mapping[str, Document]) -> Document:
    """The comparison of two results, section -> document each, as plain JSON types."""
    rows, only = [], {"only_old": [], "only_new": []}
    for section in dict.fromkeys([*old, *new]):
        a, b = (figures(section, side[section]) if section in side else {} for side in (old, new))
        for (what, setting), figure in a.items():
            if (what, setting) in b:
                place = {"section": section, "figure": what, "setting": setting}
                rows.append({**place, **judged(figure, b[what, setting])})
        for name, ours, theirs in (("only_old", a, b), ("only_new", b, a)):
            only[name] += [f"{section}: {what} ({setting})" for what, setting in ours if (what, setting) not in theirs]
    return {"kind": "comparison", "schema": 1, "origins": origins(old, new), "rows": rows, **only}


def judged(old: Figure, new: Figure) -> Document:
    """Old and new value, their ratio (null over 0), and the flag: null, "slower", "faster", "more" or "less"."""
    outside = old.value != new.value
    if outside and old.spread and new.spread:
        inside = (old.spread[0] <= new.value <= old.spread[1], new.spread[0] <= old.value <= new.spread[1])
        outside = not any(inside)
    grown = new.value > old.value
    words = {0: ("less", "more"), 1: (SLOWER, "faster"), -1: ("faster", SLOWER)}[new.better]
    return {
        "unit": new.unit,
        "old": old.value,
        "new": new.value,
        "ratio": new.value / old.value if old.value else None,
        "flag": words[grown] if outside else None,
    }


def origins(old: Mapping[str, Document], new: Mapping[str, Document]) -> list[str]:
    """How the machines, versions and commits differ, in lines; of each section that both have."""
    lines = []
    for section in (key for key in old if key in new):
        a, b = old[section]["machine"], new[section]["machine"]
        for fact in ("os", "cpu", "cores", "memory_bytes", "gpus", "python", "commit"):
            if a[fact] != b[fact]:
                lines.append(f"{fact}: {_short(a[fact])} -> {_short(b[fact])}")
        if (days := [one["date"][:10] for one in (a, b)])[0] != days[1]:
            lines.append(f"date: {days[0]} -> {days[1]}")
        for name in dict.fromkeys([*a["versions"], *b["versions"]]):
            versions = a["versions"].get(name), b["versions"].get(name)
            if versions[0] != versions[1]:
                lines.append(f"{name}: {versions[0]} -> {versions[1]}")
    return list(dict.fromkeys(lines))


def _short(fact: Any) -> str:
    return ", ".join(fact) or "none" if isinstance(fact, list) else str(fact)


def tables(comparison: Document, complete: bool) -> list[RenderableType]:
    """A table for each section and setting. complete: every figure, where it would be more than MOST lines."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    groups: dict[tuple[str, str], list[Document]] = {}
    for row in comparison["rows"]:
        groups.setdefault((row["section"], row["setting"]), []).append(row)
    result: list[RenderableType] = []
    for (section, setting), rows in groups.items():
        shown = rows if complete or len(rows) <= MOST else [row for row in rows if row["flag"]]
        made = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), title=escape(f"{section}: {setting}"))
        made.title_justify = "left"
        made.add_column("figure", overflow="fold")
        for name in ("old", "new", "new / old"):
            made.add_column(name, justify="right", no_wrap=True)
        made.add_column("outside both spreads", no_wrap=True)
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
        return f"-{duration(-value)}" if value < 0 else duration(value)
    if unit == "bytes":
        return size(value)
    if unit == "FLOP/s":
        return f"{value / 1e9:.3g} GFLOP/s"
    return f"{value:.1%}" if unit == "share" else f"{value:.3g} {unit if unit != 'error' else ''}".strip()


def sentences(comparison: Document) -> list[str]:
    """What a reader wants to know first."""
    lines = []
    for section in dict.fromkeys(row["section"] for row in comparison["rows"]):
        rows = [row for row in comparison["rows"] if row["section"] == section]
        flags = [row["flag"] for row in rows if row["flag"]]
        counts = ", ".join(f"{flags.count(flag)} {flag}" for flag in dict.fromkeys(flags)) or "none outside the spreads"
        times = [row["ratio"] for row in rows if row["unit"] == "s" and row["ratio"] and row["ratio"] > 0]
        middle = f"; times are {statistics.median(times):.2f} of the old in the median" if times else ""
        lines.append(f"{section}: {len(rows)} figures, {counts}{middle}.")
    for key, name in (("only_old", "old"), ("only_new", "new")):
        if comparison[key]:
            lines.append(f"{len(comparison[key])} figures are in the {name} result only.")
    return lines or ["The two results have no figure in common."]
