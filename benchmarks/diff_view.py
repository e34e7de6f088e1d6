"""A diff for people: a table in phases with bars of bytes, and one picture for a strategy on several targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.comm_diff import WHY, Row, sentence, step_bytes
from benchmarks.figures import save
from benchmarks.record_view import size, times
from contract.communication import PHASES, Record, totals

if TYPE_CHECKING:
    from rich.console import RenderableType

    from benchmarks.diff import Diff

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


def tables(diff: Diff) -> list[RenderableType]:
    """The rows in phases, then the three columns of totals, then a sentence for each rule."""
    return render(diff.explicit, diff.derived, diff.rows, "written", "derived") + [totals_table(diff), notes(diff)]


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


def totals_table(diff: Diff) -> RenderableType:
    """Calls, payload and wire bytes of a rank in one step: traced, derived, closed form, and the ratios to the last."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("of a rank in one step")
    for name in ("calls", "payload", "wire bytes", "of closed form"):
        table.add_column(name, justify="right")
    formula = step_bytes(diff.closed_form)
    written = "written, traced" if diff.traced else "written, closed form (too many ranks to run here)"
    columns = ((written, diff.explicit), ("derived, compiled", diff.derived), ("closed form", diff.closed_form))
    for name, records in columns:
        sums = totals(records)
        cells = [str(sums["calls"]["max"] if sums["calls"]["max"] is not None else "?")]
        cells += [size(sums[key]["max"] or sums[key]["min"]) for key in ("payload_bytes", "wire_bytes")]
        table.add_row(name, *cells, f"{step_bytes(records) / formula:.2f}" if formula else "-")
    return table


def notes(diff: Diff) -> str:
    """The sentences of the rules, and memory and work of a device."""
    parts = ", ".join(f"{name.replace('_', ' ')} {size(count)}" for name, count in diff.memory.items() if count)
    return f"{rule_notes(diff.rows, diff.explicit, diff.derived)}\nmemory of a device: {parts}{work(diff)}".lstrip()


def work(diff: Diff) -> str:
    """What a device computes and moves beside communicating, in a line of its own; "" where it was not read."""
    if not diff.work:
        return ""
    w = diff.work
    kinds = (
        ("product", "products", f"{w['flops'] / 1e9:.3g} GFLOP"),
        ("transpose", "transposes", size(w["transposed_bytes"])),
        ("copy", "copies", size(w["copied_bytes"])),
    )
    parts = [f"{w[many]} {one if w[many] == 1 else many} of {amount}" for one, many, amount in kinds if w[many]]
    return f"\nwork of a device: {', '.join(parts)}" if parts else ""


def rule_notes(rows: Sequence[Row], explicit: Sequence[Record], derived: Sequence[Record]) -> str:
    """A sentence for each rule that was used, and what no rule explains."""
    lines = []
    for rule in WHY:
        for row in (row for row in rows if rule in row.rules):
            ours, theirs = [explicit[i] for i in row.explicit], [derived[j] for j in row.derived]
            lines.append(f"{rule.replace('_', ' ')}: {sentence(rule, ours, theirs)}.")
    lines += [f"{row.verdict}: {row.why}." for row in rows if row.verdict.startswith("only")]
    return "\n".join(dict.fromkeys(lines))


def picture(diffs: Sequence[Diff], path: Path) -> None:
    """Wire bytes of a rank in one step, as written and as derived for each target, by collective: a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter

    bars: dict[str, list[Record]] = {}
    for diff in sorted(diffs, key=lambda diff: diff.run.degree):
        bars.setdefault(f"written, {diff.run.degree} ranks", diff.explicit)
        bars[f"derived for {diff.target}"] = diff.derived
    figure = Figure(figsize=(9, 1.7 + 0.45 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    used: dict[str, str] = {}
    for y, records in enumerate(bars.values()):
        left = 0
        for record in sorted(records, key=lambda r: PHASES.index(r.phase)):
            width, colour = step_bytes([record]), used.setdefault(record.op, COLOURS.get(record.op, OTHER))
            hatch = "///" if record.phase == "backward" else None
            axes.barh(y, width, left=left, color=colour, edgecolor="white", linewidth=0.8, hatch=hatch, height=0.66)
            left += width
        axes.annotate(size(left), (left, y), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlabel("wire bytes that a rank sends in one step")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x)))
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    run = diffs[0].run
    sizes = f"batch {run.problem.batch}, width {run.problem.width}, {run.problem.layers} layers, {run.problem.dtype}"
    axes.set_title(
        f"{run.strategy}: written in torch, derived by XLA from {run.implementation} JAX\n{sizes}", loc="left"
    )
    legend = [Patch(facecolor=colour, label=op) for op, colour in used.items()]
    legend.append(Patch(facecolor="#bbbbbb", edgecolor="white", hatch="///", label="in the backward pass"))
    figure.legend(handles=legend, loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)
