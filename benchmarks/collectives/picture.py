"""A picture of busbw over payload."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

from benchmarks.documents.collectives import Collectives
from benchmarks.words import binary_size, counted
from shardiff.diff.view import COLOURS, OTHER
from shardiff.system.files import save

# A rooted op has the colour of the rootless one that moves the same blocks, and hollow marks.
COLOUR = {
    "broadcast": "#56B4E9",
    "scatter": COLOURS["reduce_scatter"],
    "gather": COLOURS["all_gather"],
    "reduce": COLOURS["all_reduce"],
    "all_gather": COLOURS["all_gather"],
    "reduce_scatter": COLOURS["reduce_scatter"],
    "all_reduce": COLOURS["all_reduce"],
    "all_to_all": COLOURS["all_to_all"],
    "permute": COLOURS["collective_permute"],
}
ROOTED = ("broadcast", "scatter", "gather", "reduce")
LINE: dict[str, Any] = {"torch": "-", "jax": "--"}


def picture(result: Collectives, path: Path) -> None:
    """busbw of single calls over payload, a panel for each world size: a PNG. algbw where only one rank ran."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    rows = [row for row in result.rows if row.mode == "per_iteration"]
    over_bus = any(row.busbw_GBps for row in rows)
    name_of = "busbw" if over_bus else "algbw"
    rates = [(row, row.busbw_GBps if over_bus else row.algbw_GBps) for row in rows]
    rates = [(row, rate) for row, rate in rates if rate]
    loopback = result.floor.loopback_GBps if result.floor and result.settings.device == "cpu" and over_bus else {}
    counts = sorted({row.ranks for row, _ in rates})
    figure = Figure(figsize=(max(6.4, 4.6 * len(counts)), 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    curves: dict[tuple[int, str, str], list[tuple[int, float]]] = {}
    for row, rate in rates:
        curves.setdefault((row.ranks, row.op, row.implementation), []).append((row.bytes, rate))
    for axes, ranks in zip(panels, counts, strict=True):
        if str(ranks) in loopback:
            axes.axhline(loopback[str(ranks)], color=OTHER, linewidth=3, alpha=0.6, zorder=1)
        for (count, op, name), points in curves.items():
            if count == ranks:
                axes.plot(*zip(*sorted(points), strict=True), LINE[name], **_marks(op))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = sorted({row.bytes for row, _ in rates})
        axes.xaxis.set_major_locator(FixedLocator(sizes[:: -(-len(sizes) // 6)]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: binary_size(x)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.tick_params(axis="x", labelsize=8)
        axes.set_title(counted(ranks, "rank"), loc="left")
        axes.set_xlabel("payload S")
        axes.grid(True, color="#e5e5e5", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"{name_of} in GB/s (1e9 bytes a second)")
    ops, names = (list(dict.fromkeys(map(key, rows))) for key in (attrgetter("op"), attrgetter("implementation")))
    legend = [Line2D([], [], linestyle="-", label=op, **_marks(op)) for op in ops]
    legend += [Line2D([], [], linestyle=LINE[name], color="#333333", label=name) for name in names]
    if loopback:
        legend.append(
            Line2D([], [], color=OTHER, linewidth=3, alpha=0.6, label="TCP over loopback, one stream per rank")
        )
    figure.legend(
        handles=legend, loc="outside lower center", ncols=5 if len(counts) > 1 else 3, frameon=False, fontsize=8.5
    )
    facts, transport = result.machine, result.settings.transport
    where = f"{facts.cpu}, {facts.cores} cores, {facts.date[:10]}"
    figure.suptitle(f"{name_of} of single calls, median; {transport}\n{where}", x=0.01, ha="left", fontsize=11)
    save(figure, path)


def _marks(op: str) -> dict[str, Any]:
    fill = "white" if op in ROOTED else COLOUR[op]
    return {"color": COLOUR[op], "marker": "o", "markersize": 4, "markerfacecolor": fill, "linewidth": 1.3}
