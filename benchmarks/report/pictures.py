"""Pictures of a report: the bandwidth of each collective, and memory; and how any picture becomes a block."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.documents.collectives import Collectives, Fit
from benchmarks.documents.collectives import Row as Timed
from benchmarks.documents.steps import KINDS, Held, Row, Steps
from benchmarks.report.blocks import Block, Picture, Text
from benchmarks.words import binary_size, counted
from shardiff.diff.view import OTHER
from shardiff.system.files import save
from shardiff.system.words import size

Draw = Callable[[str, str, Callable[[Path], object]], list[Block]]  # name, what it shows, what draws it into a file

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = dict(zip(KINDS, ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7"), strict=True))
SIDES = {"torch": ("#0072B2", "o"), "jax": ("#D55E00", "^")}
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")


def drawn(name: str, text: str, draw: Callable[[Path], object]) -> list[Block]:
    """The picture that `draw` saves, as SVG; where it cannot be drawn, the reason: a picture must not cost a report."""
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns when it has to look for fonts
    with tempfile.TemporaryDirectory(prefix="shardiff-") as directory, matplotlib.rc_context({"svg.hashsalt": name}):
        path = Path(directory, f"{name}.svg")
        try:
            draw(path)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            return [Text(f"The picture {name} could not be drawn: {type(error).__name__} {error}.", "warning")]
        return [Picture(name, text, path.read_bytes())]


def bandwidth(result: Collectives, path: Path) -> None:
    """busbw over payload: a panel for each collective, a line for each fit, loopback's bandwidth in grey."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    rows = [row for row in result.rows if row.mode == "per_iteration" and row.busbw_GBps]
    fits = [one for one in result.fits if one.mode == "per_iteration"]
    ops, names = list(dict.fromkeys(row.op for row in rows)), list(dict.fromkeys(row.implementation for row in rows))
    counts = list(dict.fromkeys(row.ranks for row in rows))
    loopback = result.floor.loopback_GBps if result.floor else {}
    across = min(3, max(1, len(ops)))
    down = max(1, -(-len(ops) // across))
    figure = Figure(figsize=(9, 1.5 + 2.3 * down), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    sizes = sorted({row.bytes for row in rows})
    for axes, op in zip(panels.flat, ops, strict=False):
        _curves(axes, [r for r in rows if r.op == op], [one for one in fits if one.op == op], counts)
        for ranks in counts:
            if floor := loopback.get(str(ranks)):
                axes.axhline(floor, color=OTHER, linestyle=_dash(ranks, counts), linewidth=2, alpha=0.6, zorder=1)
        axes.set_title(op, loc="left", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator(sizes[:: -(-len(sizes) // 4)]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: binary_size(x)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.tick_params(labelsize=8)
        axes.grid(True, color="#e5e5e5", linewidth=0.6)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_visible(axes in list(panels.flat)[: len(ops)])
    for column in range(across):  # the lowest panel that is there
        lowest = panels[max(i for i in range(down) if panels[i][column].get_visible() or i == 0)][column]
        lowest.tick_params(labelbottom=True)
        lowest.set_xlabel("payload S", fontsize=9)
    figure.supylabel("busbw in GB/s (1e9 bytes a second)", fontsize=9)
    several = len(counts) > 1
    legend = [
        Line2D([], [], color=SIDES[name][0], marker=SIDES[name][1], linestyle="none", label=f"{name}, measured")
        for name in names
    ]
    legend += [
        Line2D(
            [], [], color="#333333", linestyle=_dash(n, counts), label=f"fit t = alpha + S/beta, {counted(n, 'rank')}"
        )
        for n in counts
    ]
    legend.append(Line2D([], [], color=OTHER, linewidth=2, alpha=0.6, label="TCP over loopback, a stream per rank"))
    if several:
        legend.append(
            Line2D(
                [],
                [],
                color="#333333",
                marker="o",
                markerfacecolor="white",
                linestyle="none",
                label=f"hollow: {counts[-1]} ranks",
            )
        )
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    transport = result.settings.transport
    figure.suptitle(f"Bus bandwidth of single calls, median; {transport}", x=0.01, ha="left", fontsize=11)
    save(figure, path)


def _dash(ranks: int, counts: Sequence[int]) -> Any:
    return DASHES[list(counts).index(ranks) % len(DASHES)]


def _curves(axes: Any, rows: Sequence[Timed], fits: Sequence[Fit], counts: Sequence[int]) -> None:
    """Measured points, and the fits over the same payloads as lines; points are joined where there is no fit."""
    fitted = {(one.implementation, one.ranks): one for one in fits}
    factors = {(r.implementation, r.ranks): r.busbw_GBps / r.algbw_GBps for r in rows}
    for name, ranks in dict.fromkeys((row.implementation, row.ranks) for row in rows):
        mine = sorted((r.bytes, r.busbw_GBps) for r in rows if (r.implementation, r.ranks) == (name, ranks))
        (x, y), (colour, mark) = zip(*mine, strict=True), SIDES[name]
        fill = "white" if ranks == counts[-1] and len(counts) > 1 else colour
        axes.plot(x, y, mark, color=colour, markersize=4.5, markerfacecolor=fill, zorder=3)
        if one := fitted.get((name, ranks)):
            low, high, factor = x[0], x[-1], factors[name, ranks]
            x = [low * (high / low) ** (i / 40) for i in range(41)]
            slope = 1 / (one.beta_GBps * 1e9) if one.beta_GBps else 0
            y = [factor * s / (one.alpha_s + slope * s) / 1e9 for s in x]
        axes.plot(x, y, _dash(ranks, counts), color=colour, linewidth=1.1, alpha=0.8, zorder=2)


def memory(result: Steps, path: Path) -> None:
    """Bytes of the rank that holds most: two bars for each contestant, measured and by the closed form."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter

    panels: dict[int, list[Row]] = {}
    for row in result.rows:
        if any(row.memory.measured.by_kind().values()):
            panels.setdefault(row.ranks, []).append(row)
    heights = [len(rows) + len({row.title for row in rows}) for rows in panels.values()]
    figure = Figure(figsize=(9, 1.6 + 0.3 * sum(heights) + 0.5 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (ranks, rows) in zip(all_axes, panels.items(), strict=True):
        _memory_panel(axes, ranks, rows)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x)))
        axes.tick_params(axis="x", labelbottom=True, labelsize=8)
    all_axes[0].margins(x=0.3)
    all_axes[0].set_xlim(left=0)
    all_axes[-1].set_xlabel("bytes of the rank that holds most")
    figure.suptitle("Memory of a training step, measured and by the closed form", x=0.01, ha="left", fontsize=11)
    legend = [Patch(facecolor=colour, label=kind.replace("_", " ")) for kind, colour in COLOURS.items()]
    legend.append(Patch(facecolor="#bbbbbb", edgecolor="white", hatch="////", label="closed form (lower bar)"))
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save(figure, path)


def _memory_panel(axes: Any, ranks: int, rows: Sequence[Row]) -> None:
    y, ticks, shown = 0.0, [], None
    for row in rows:
        if row.title != shown:
            shown = row.title
            axes.annotate(shown, (0, y), xytext=(3, 0), textcoords="offset points", va="center", weight="bold", size=9)
            y += 1
        totals = []
        measured = row.memory.measured
        bars: tuple[tuple[Held | None, float, str | None], ...]
        bars = ((measured, y - 0.18, None), (row.memory.closed_form, y + 0.2, "////"))
        for held, place, hatch in bars:
            left = 0
            for kind, colour in COLOURS.items():
                count = (held.by_kind()[kind] if held else None) or 0
                style = {"color": colour, "edgecolor": "white", "hatch": hatch, "linewidth": 0.4}
                axes.barh(place, count, left=left, height=0.36, **style)
                left += count
            totals.append(left)
        text = size(totals[0]) + (f"; closed form {size(totals[1])}" if totals[1] else "")
        if not (measured.activations or measured.temporaries):
            text += "; activations not measured"
        axes.annotate(text, (max(totals), y), xytext=(4, 0), textcoords="offset points", va="center", size=8)
        ticks.append(y)
        y += 1
    axes.set_yticks(ticks, [row.label for row in rows], fontsize=8)
    axes.set_ylim(y - 0.4, -0.7)
    axes.set_title(counted(ranks, "rank"), loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
