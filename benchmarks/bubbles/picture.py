"""A Gantt chart of a pipeline's stages, with measured bubbles beside the closed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.bubbles import timeline
from benchmarks.documents.bubbles import Bubbles, Row, Timeline
from benchmarks.words import counted
from shardiff.system.files import save

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = {"forward": "#56B4E9", "backward": "#E69F00", "backward_input": "#F0E442", "backward_weight": "#CC79A7"}
PASSES = {"backward_input": "gradient of the input", "backward_weight": "gradients of the weights"}
BUBBLE = "#d0d0d0"
MARKS = {"torch": ("o", "#0072B2"), "shard_map": ("s", "#D55E00"), "annotated": ("^", "#009E73")}


def picture(result: Bubbles, path: Path) -> None:
    """A Gantt chart of torch's stages for each number of microbatches, and measured against theory below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    charts = [one for one in result.timelines if one.framework == "torch"]
    heights = [0.35 + 0.3 * one.stages for one in charts] + [2.6]
    figure = Figure(figsize=(9, 1.3 + sum(heights) + 0.35 * len(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    *gantts, curve = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    rows = {row.key: row for row in result.rows}
    longest = max((event.end for one in charts for event in one.events), default=1) / 1e6
    for axes, one in zip(gantts, charts, strict=True):
        gantt(axes, one, rows[one.key], longest)
    if gantts:
        gantts[-1].set_xlabel("time since the first action, ms")
    curves(curve, result.rows)
    figure.suptitle(
        f"The bubble of a pipeline, measured: torch, one process per stage\n{result.settings}",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    seen = {event.kind for one in charts for event in one.events}
    legend = [
        Patch(facecolor=colour, label=PASSES.get(kind, f"{kind} pass of a microbatch"))
        for kind, colour in COLOURS.items()
        if kind in seen
    ]
    legend.append(Patch(facecolor=BUBBLE, edgecolor="#808080", hatch="////", label="bubble: the stage is idle"))
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


def gantt(axes: Any, one: Timeline, row: Row, longest: float) -> None:
    """Stages as rows; an action is labelled where its block is wide enough for the label."""
    events = one.events
    first, _ = timeline.span(events)
    for e in events:
        if e.kind in timeline.BUSY:
            start, width = (e.start - first) / 1e6, (e.end - e.start) / 1e6
            axes.barh(e.rank, width, left=start, color=COLOURS[e.kind], edgecolor="white", linewidth=0.5, height=0.8)
            text = timeline.label(e)
            if width > 0.016 * len(text) * longest:
                axes.text(start + width / 2, e.rank, text, ha="center", va="center", fontsize=8)
    for rank in range(one.stages):
        for start, end in timeline.idle(events, rank):
            left, width = (start - first) / 1e6, (end - start) / 1e6
            style = {"color": BUBBLE, "edgecolor": "#808080", "hatch": "////", "linewidth": 0.3}
            axes.barh(rank, width, left=left, height=0.8, **style)
    axes.set_yticks(range(one.stages), [f"stage {rank}" for rank in range(one.stages)], fontsize=8)
    axes.set_ylim(one.stages - 0.5, -0.5)
    axes.set_xlim(0, longest * 1.01)
    axes.tick_params(axis="x", labelsize=8)
    name = f"{one.order}, {counted(one.microbatches, 'microbatch', 'microbatches')}{', paced' if row.paced else ''}"
    idle = f"idle {100 * row.measured.median:.1f} % (median), theory {100 * row.theory:.1f} %"
    axes.set_title(f"{name}: {idle}", loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def curves(axes: Any, rows: list[Row]) -> None:
    """Measured bubbles of GPipe's order over m, one mark for each implementation, and the closed form as a line."""
    rows = [row for row in rows if row.order in ("gpipe", "naive" if row.microbatches == 1 else "gpipe")]
    microbatches = sorted({row.microbatches for row in rows})
    for stages in sorted({row.stages for row in rows}):
        theory = [(stages - 1) / (m + stages - 1) for m in microbatches]
        axes.plot(microbatches, theory, color="black", linewidth=1, label=f"(p-1)/(m+p-1), p = {stages}")
        for name, (mark, colour) in MARKS.items():
            mine = [row for row in rows if row.implementation == name and row.stages == stages]
            if mine:
                y = [row.measured.median for row in mine]
                low = [row.measured.median - row.measured.q1 for row in mine]
                high = [row.measured.q3 - row.measured.median for row in mine]
                x = [row.microbatches for row in mine]
                note = "" if name == "torch" else " (bubble and communication)"
                shape = {"marker": mark, "color": colour, "linestyle": "none", "capsize": 3, "markersize": 5}
                axes.errorbar(x, y, yerr=[low, high], label=f"{name}{note}, p = {stages}", **shape)
    axes.set_xscale("log", base=2)
    axes.set_xticks(microbatches, [str(m) for m in microbatches])
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.set_xlabel("microbatches m")
    axes.set_ylabel("share of the stages' time\nthat is lost")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
