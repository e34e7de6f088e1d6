"""A picture of step times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.documents.steps import Row, Steps
from benchmarks.words import counted
from shardiff.system.files import save

COMPUTE, EXPOSED, WHOLE = "#0072B2", "#E69F00", "#999999"  # Okabe and Ito's


def picture(result: Steps, path: Path) -> None:
    """Step times as bars of compute and exposed communication, with a panel for each number of ranks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels: dict[int, list[Row]] = {}
    for row in result.rows:
        panels.setdefault(row.ranks, []).append(row)
    heights = [len(rows) + len({row.title for row in rows}) for rows in panels.values()]
    figure = Figure(figsize=(9, 1.6 + 0.25 * sum(heights) + 0.5 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (ranks, rows) in zip(all_axes, panels.items(), strict=True):
        _panel(axes, ranks, rows)
    all_axes[-1].set_xlabel("time of one training step, ms (median; whisker: quartiles)")
    sizes = f"{result.settings}, {result.settings.optimizer}"
    figure.suptitle(f"Training steps, the slowest rank of each\n{sizes}", x=0.01, ha="left", fontsize=11)
    legend = [
        Patch(facecolor=COMPUTE, label="compute"),
        Patch(facecolor=EXPOSED, hatch="///", edgecolor="white", label="exposed communication"),
        Patch(facecolor=WHOLE, label="not split"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


def _panel(axes: Any, ranks: int, rows: list[Row]) -> None:
    y, ticks, labels, shown = 0.0, [], [], None
    for row in rows:
        if row.title != shown:
            shown = row.title
            axes.annotate(shown, (0, y), xytext=(3, 0), textcoords="offset points", va="center", weight="bold", size=9)
            y += 1
        low, median, high = (1e3 * s for s in (row.step_seconds.q1, row.step_seconds.median, row.step_seconds.q3))
        share = row.exposed_share
        exposed = median * min(1, share or 0)
        axes.barh(y, median - exposed, color=WHOLE if share is None else COMPUTE, height=0.72)
        axes.barh(y, exposed, left=median - exposed, color=EXPOSED, hatch="///", edgecolor="white", height=0.72)
        spread = [[median - low], [high - median]]
        axes.errorbar(median, y, xerr=spread, color="black", capsize=2, linewidth=0.9)
        at = (high, y)
        axes.annotate(f"{median:.1f}", at, xytext=(5, 0), textcoords="offset points", va="center", size=8)
        ticks.append(y)
        labels.append(row.label)
        y += 1
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set_ylim(y - 0.4, -0.7)
    axes.set_xlim(0, 1.12e3 * max(row.step_seconds.q3 for row in rows))
    axes.set_title(counted(ranks, "rank"), loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
