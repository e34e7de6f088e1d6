"""The diff of a strategy for people: its three columns, and one picture for several targets."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import terminal
from benchmarks.diff_strategies import StrategyDiff
from benchmarks.problems import words_of
from shardiff.diff.view import COLOURS, OTHER, notes, table
from shardiff.record import PHASES, Record, step_bytes, totals
from shardiff.system.files import save
from shardiff.system.words import size

if TYPE_CHECKING:
    from rich.console import RenderableType

SIDES = ("written", "derived")


def parts(one: StrategyDiff) -> Iterator[RenderableType]:
    """All that is printed: the rows in phases, the three columns of totals, a sentence for each rule."""
    from rich.text import Text

    run = one.run
    yield Text(f"{run.strategy}, {run.implementation}, for {one.target} ({run.mesh}): {words_of(run)}", style="bold")
    yield table(one.diff.rows, SIDES)
    yield totals_table(one)
    yield sentences(one)
    yield ""


def pictures(diffs: Sequence[StrategyDiff], path: Path) -> None:
    """A picture for each strategy, whose name is added to that of the file where there are several."""
    strategies = list(dict.fromkeys(one.run.strategy for one in diffs))
    for strategy in strategies:
        mine = [one for one in diffs if one.run.strategy == strategy]
        name = strategy.replace(" ", "")
        picture(mine, path.with_stem(f"{path.stem}_{name}") if len(strategies) > 1 else path)


def totals_table(one: StrategyDiff) -> RenderableType:
    """Calls, payload and wire bytes of a rank in a step: traced, derived and by the closed form, with ratios to it."""
    numbers = ["calls", "payload", "wire bytes", "of closed form"]
    result = terminal.table(["one rank, one step"], numbers, gap=2)
    formula = step_bytes(one.closed_form)
    written = "written, traced" if one.traced else "written, closed form (too many ranks to run here)"
    columns: tuple[tuple[str, Sequence[Record]], ...] = (
        (written, one.diff.left.records),
        ("derived, compiled", one.diff.right.records),
        ("closed form", one.closed_form),
    )
    for name, records in columns:
        sums = totals(records)
        cells = [str(sums["calls"]["max"] if sums["calls"]["max"] is not None else "?")]
        cells += [size(sums[key]["max"] or sums[key]["min"]) for key in ("payload_bytes", "wire_bytes")]
        result.add_row(name, *cells, f"{step_bytes(records) / formula:.2f}" if formula else "-")
    return result


def sentences(one: StrategyDiff) -> str:
    """The sentences of the rules, and memory and work of a device."""
    memory = one.diff.right.memory.items()
    parts = ", ".join(f"{name.replace('_', ' ')} {size(count)}" for name, count in memory if count)
    return f"{notes(one.diff.rows, SIDES)}\nmemory of a device: {parts}{work(one)}".lstrip()


def work(one: StrategyDiff) -> str:
    """What a device computes and moves besides communicating, in a line of its own; "" if it is not known."""
    if not one.work:
        return ""
    w = one.work
    kinds = (
        ("product", "products", f"{w['flops'] / 1e9:.3g} GFLOP"),
        ("transpose", "transposes", size(w["transposed_bytes"])),
        ("copy", "copies", size(w["copied_bytes"])),
    )
    parts = [f"{w[many]} {one if w[many] == 1 else many} of {amount}" for one, many, amount in kinds if w[many]]
    return f"\nwork of a device: {', '.join(parts)}" if parts else ""


def picture(diffs: Sequence[StrategyDiff], path: Path) -> None:
    """Wire bytes of a rank in one step, as written and as derived for each target, by collective: a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter

    bars: dict[str, Sequence[Record]] = {}
    for one in sorted(diffs, key=lambda one: one.run.world_size):
        bars.setdefault(f"written, {one.run.world_size} ranks", one.diff.left.records)
        bars[f"derived for {one.target}"] = one.diff.right.records
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
    what = f"{run.strategy}: written in torch, derived by XLA from {run.implementation} JAX"
    axes.set_title(f"{what}\n{textwrap.fill(words_of(run), 90)}", loc="left")
    legend = [Patch(facecolor=colour, label=op) for op, colour in used.items()]
    legend.append(Patch(facecolor="#bbbbbb", edgecolor="white", hatch="///", label="in the backward pass"))
    figure.legend(handles=legend, loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)
