"""What `shardiff bench bubbles` shows: the run with its progress, a table, Perfetto's trace, and a Gantt chart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bubbles import bubbles, timeline
from benchmarks.documents import resume
from shardiff.ranks.verdict import WorkerError
from shardiff.system import machine
from shardiff.system.files import keeper, save, write

if TYPE_CHECKING:
    from rich.console import RenderableType

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = {"forward": "#56B4E9", "backward": "#E69F00"}
BUBBLE = "#d0d0d0"
MARKS = {"torch": ("o", "#0072B2"), "shard_map": ("s", "#D55E00"), "annotated": ("^", "#009E73")}


def show(
    plan: bubbles.Plan,
    output: Path | None,
    picture_file: Path | None,
    trace_file: Path | None,
    as_json: bool,
    kept: dict[str, Any] | None = None,
) -> int:
    """Measure, write the files, print a table or JSON; the exit status."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=len(plan.runs))
        keep, placed = keeper(output), True

        def save_it(document: dict[str, Any]) -> None:
            nonlocal placed
            progress.update(task, completed=len(document["rows"]))
            placed = keep(document)

        try:
            document = bubbles.measure(plan, save_it, lambda what: progress.update(task, description=what), kept)
        except WorkerError as error:  # of either launcher
            progress.stop()
            report = str(error).strip()
            print(f"{report}\nshardiff: bench bubbles: {report.splitlines()[0].rstrip(':')}", file=sys.stderr)
            return 3
    if as_json:
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
        console.print(table(document))
        for line in [*notes(document), machine.summary(document["machine"])]:
            console.print(line, markup=False)
    if trace_file is not None:
        write(trace_file, timeline.chrome_trace(titled(document)))
    if picture_file is not None:
        picture(document, picture_file)
    return 0 if placed else 2


def titled(document: dict[str, Any]) -> dict[str, list[timeline.Event]]:
    """The timelines under the names that a trace shows."""
    return {
        f"{one['implementation']}, {one['stages']} stages, {one['microbatches']} microbatches": [
            timeline.Event(*event) for event in one["events"]
        ]
        for one in document["timelines"]
    }


def table(document: dict[str, Any]) -> RenderableType:
    """One line a run."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("implementation", "schedule"):
        made.add_column(name)
    for name in ("p", "m", "(p-1)/(m+p-1)", "measured", "quartiles", "of theory", "weighted", "step ms"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in document["rows"]:
        measured = row["measured"]
        made.add_row(
            row["implementation"],
            row["schedule"],
            str(row["stages"]),
            str(row["microbatches"]),
            f"{row['theory']:.3f}",
            f"{measured['median']:.3f}",
            f"{measured['q1']:.3f} - {measured['q3']:.3f}",
            f"{row['of_theory']:.2f}",
            f"{row['weighted']['median']:.3f}" if row["weighted"] else "-",
            f"{1e3 * row['step_seconds']['median']:.1f}",
        )
    return made


def notes(document: dict[str, Any]) -> list[str]:
    """What the numbers are, what was left out, and the fits."""
    s = document["settings"]
    lines = [one["reason"] + ": not measured" for one in document["skipped"]]
    lines.append(
        "torch: idle over total stage-time, from timelines; weighted: the schedule with the measured durations"
    )
    if any(row["framework"] == "jax" for row in document["rows"]):
        lines.append("shard_map, annotated: step time that is not a stage's own work: bubble and communication")
    for fit in document["fits"]:
        lines.append(
            f"{fit['implementation']}, p = {fit['stages']}: step = {1e3 * fit['work_seconds']:.1f} ms (m+p-1)/m + "
            f"{1e3 * fit['tick_seconds']:.2f} ms (m+p-1), within {100 * fit['worst_residual']:.0f} %"
        )
    lines += [origin] if (origin := resume.sentence(document)) else []
    return [
        *lines,
        f"batch {s['batch']}, width {s['width']}, {s['layers']} layers, {s['dtype']}, {s['iterations']} steps",
    ]


def picture(document: dict[str, Any], path: Path) -> None:
    """A Gantt chart of torch's stages for each number of microbatches, and measured against theory below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    charts = [one for one in document["timelines"] if one["framework"] == "torch"]
    heights = [0.35 + 0.3 * one["stages"] for one in charts] + [2.6]
    figure = Figure(figsize=(9, 1.3 + sum(heights) + 0.35 * len(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    *gantts, curve = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    rows = {(row["implementation"], row["stages"], row["microbatches"]): row for row in document["rows"]}
    longest = max((event[4] for one in charts for event in one["events"]), default=1) / 1e6
    for axes, one in zip(gantts, charts, strict=True):
        gantt(axes, one, rows["torch", one["stages"], one["microbatches"]], longest)
    if gantts:
        gantts[-1].set_xlabel("time since the first action, ms")
    curves(curve, document["rows"])
    s = document["settings"]
    figure.suptitle(
        "The bubble of a pipeline, measured: torch, one process per stage\n"
        f"batch {s['batch']}, width {s['width']}, {s['layers']} layers, {s['dtype']}",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    legend = [Patch(facecolor=colour, label=f"{kind} pass of a microbatch") for kind, colour in COLOURS.items()]
    legend.append(Patch(facecolor=BUBBLE, edgecolor="#808080", hatch="////", label="bubble: the stage is idle"))
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


def gantt(axes: Any, one: dict[str, Any], row: dict[str, Any], longest: float) -> None:
    """Stages as rows; an action is labelled where its block is wide enough for the label."""
    events = [timeline.Event(*event) for event in one["events"]]
    first, _ = timeline.span(events)
    for e in events:
        if e.kind in timeline.BUSY:
            start, width = (e.start - first) / 1e6, (e.end - e.start) / 1e6
            axes.barh(e.rank, width, left=start, color=COLOURS[e.kind], edgecolor="white", linewidth=0.5, height=0.8)
            text = timeline.label(e)
            if width > 0.016 * len(text) * longest:
                axes.text(start + width / 2, e.rank, text, ha="center", va="center", fontsize=8)
    for rank in range(one["stages"]):
        for start, end in timeline.idle(events, rank):
            left, width = (start - first) / 1e6, (end - start) / 1e6
            style = {"color": BUBBLE, "edgecolor": "#808080", "hatch": "////", "linewidth": 0.3}
            axes.barh(rank, width, left=left, height=0.8, **style)
    axes.set_yticks(range(one["stages"]), [f"stage {rank}" for rank in range(one["stages"])], fontsize=8)
    axes.set_ylim(one["stages"] - 0.5, -0.5)
    axes.set_xlim(0, longest * 1.01)
    axes.tick_params(axis="x", labelsize=8)
    m = one["microbatches"]
    name = "naive, 1 microbatch" if m == 1 else f"GPipe, {m} microbatches"
    idle = f"idle {100 * row['measured']['median']:.0f} % (median), theory {100 * row['theory']:.0f} %"
    axes.set_title(f"{name}: {idle}", loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def curves(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Measured bubbles over m, one mark for each implementation, and the closed form as a line."""
    microbatches = sorted({row["microbatches"] for row in rows})
    for stages in sorted({row["stages"] for row in rows}):
        theory = [(stages - 1) / (m + stages - 1) for m in microbatches]
        axes.plot(microbatches, theory, color="black", linewidth=1, label=f"(p-1)/(m+p-1), p = {stages}")
        for name, (mark, colour) in MARKS.items():
            mine = [row for row in rows if row["implementation"] == name and row["stages"] == stages]
            if mine:
                y = [row["measured"]["median"] for row in mine]
                low = [row["measured"]["median"] - row["measured"]["q1"] for row in mine]
                high = [row["measured"]["q3"] - row["measured"]["median"] for row in mine]
                x = [row["microbatches"] for row in mine]
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
