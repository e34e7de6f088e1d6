"""What `shardiff bench steps` shows: the run with its progress, tables, and a picture of step times."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.documents import resume
from benchmarks.steps import steps
from benchmarks.steps import why as steps_why
from shardiff.ranks.verdict import WorkerError
from shardiff.system import machine
from shardiff.system.files import keeper, save
from shardiff.system.words import size

if TYPE_CHECKING:
    from rich.console import RenderableType

COMPUTE, EXPOSED, WHOLE = "#0072B2", "#E69F00", "#999999"  # Okabe and Ito's
HELD = ("parameters", "gradients", "optimizer_state")


def show(
    plan: steps.Plan,
    output: Path | None,
    picture_file: Path | None,
    as_json: bool,
    kept: dict[str, Any] | None = None,
) -> int:
    """Measure, write the files, print tables or JSON; the exit status."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    keep, placed = keeper(output), True

    def save_it(document: dict[str, Any]) -> None:
        nonlocal placed
        placed = keep(document)

    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("")
        try:
            document = steps.measure(plan, save_it, lambda what: progress.update(task, description=what), kept)
        except (WorkerError, TimeoutError) as error:
            progress.stop()
            report = str(error).strip()
            print(f"{report}\nshardiff: bench steps: {report.splitlines()[0].rstrip(':')}", file=sys.stderr)
            return 3
    if as_json:
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
        for part in tables(document):
            console.print(part)
        origin = resume.sentence(document)
        lines = [*document["failures"], *steps_why.reasons(document), setting(document), *([origin] if origin else [])]
        for line in [*lines, machine.summary(document["machine"])]:
            console.print(line, markup=False)
    if picture_file is not None:
        picture(document, picture_file)
    return (1 if document["failures"] else 0) if placed else 2


def setting(document: dict[str, Any]) -> str:
    """Sizes and method in a line."""
    s = document["settings"]
    rounds = f"{s['iterations']} iterations in {s['rounds']} rounds, torch and JAX alternating"
    return f"{sizes(document)}; pipeline in {s['microbatches']} microbatches; {rounds}; medians of the slowest rank"


def sizes(document: dict[str, Any]) -> str:
    """The problem in words."""
    s = document["settings"]
    return f"batch {s['batch']}, width {s['width']}, {s['layers']} layers, {s['dtype']}, {s['optimizer']}"


def tables(document: dict[str, Any]) -> list[RenderableType]:
    """Steps, ratios, and the rates of a single device."""
    parts = [step_table(document)]
    if document["ratios"]:
        parts.append(ratio_table(document))
    if document["single_device"]:
        parts.append(rate_table(document))
    return parts


def table(left: list[str], right: list[str]) -> Any:
    """An empty table with columns that are words and columns that are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in left:
        made.add_column(name, no_wrap=True)
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def step_table(document: dict[str, Any]) -> RenderableType:
    """One line a contestant."""
    numbers = ["step ms", "quartiles", "compute", "exposed", "held", "formula", "wire"]
    made = table(["strategy", "ranks", "implementation"], numbers)
    shown = None
    for row in document["rows"]:
        held, formula = (total(row["memory"][key]) for key in ("measured", "closed_form"))
        step, where = row["step_seconds"], (row["strategy"], row["ranks"])
        made.add_row(
            *((where[0], str(where[1])) if where != shown else ("", "")),
            row["implementation"],
            ms(step["median"]),
            f"{ms(step['q1'])} - {ms(step['q3'])}",
            *(ms(row[key]["median"]) if row[key] else "-" for key in ("compute_seconds", "exposed_seconds")),
            size(held) if held is not None else "-",
            f"{held / formula:.2f}" if held is not None and formula is not None else "-",
            size(row["wire_bytes"]) if row["wire_bytes"] is not None else "-",
        )
        shown = where
    return made


def total(memory: dict[str, int | None] | None) -> int | None:
    """Bytes of parameters, gradients and optimizer state together."""
    parts = [memory[key] for key in HELD] if memory else [None]
    return None if None in parts else sum(part for part in parts if part is not None)


def ratio_table(document: dict[str, Any]) -> RenderableType:
    """One line a pair of contestants."""
    made = table(["strategy", "ranks", "step time of", "over"], ["ratio", "quartiles", "by"])
    for row in document["ratios"]:
        ratio = row["ratio"]
        cells = (row["strategy"], str(row["ranks"]), row["of"], row["to"])
        made.add_row(*cells, f"{ratio['median']:.2f}", f"{ratio['q1']:.2f} - {ratio['q3']:.2f}", row["by"])
    return made


def rate_table(document: dict[str, Any]) -> RenderableType:
    """One device: the passes' share of the matrix-product rate, and the update's of the copy bandwidth."""
    numbers = ["matmul GFLOP/s", "passes GFLOP/s", "share", "copy GB/s", "update GB/s", "share"]
    made = table(["single device"], numbers)
    for row in document["single_device"]:
        rates = ("matmul_flops_per_second", "forward_backward_flops_per_second", "share")
        rates += ("copy_bytes_per_second", "update_bytes_per_second", "update_share")
        values = [row[key]["median"] / (1 if key.endswith("share") else 1e9) for key in rates]
        cells = [f"{value:.{2 if key.endswith('share') else 1}f}" for key, value in zip(rates, values, strict=True)]
        made.add_row(f"{row['framework']}, batch {row['batch']}", *cells)
    return made


def ms(seconds: float) -> str:
    """Milliseconds."""
    return f"{1e3 * seconds:.1f}"


def picture(document: dict[str, Any], path: Path) -> None:
    """Step time of every contestant as a bar of compute and exposed communication, a panel for each number of ranks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels: dict[int, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        panels.setdefault(row["ranks"], []).append(row)
    heights = [len(rows) + len({row["strategy"] for row in rows}) for rows in panels.values()]
    figure = Figure(figsize=(9, 1.6 + 0.25 * sum(heights) + 0.5 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (ranks, rows) in zip(all_axes, panels.items(), strict=True):
        _panel(axes, ranks, rows)
    all_axes[-1].set_xlabel("time of one training step, ms (median; whisker: quartiles)")
    figure.suptitle(f"Training steps, the slowest rank of each\n{sizes(document)}", x=0.01, ha="left", fontsize=11)
    legend = [
        Patch(facecolor=COMPUTE, label="compute"),
        Patch(facecolor=EXPOSED, hatch="///", edgecolor="white", label="exposed communication"),
        Patch(facecolor=WHOLE, label="not split"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


def _panel(axes: Any, ranks: int, rows: list[dict[str, Any]]) -> None:
    y, ticks, labels, shown = 0.0, [], [], None
    for row in rows:
        if row["strategy"] != shown:
            shown = row["strategy"]
            axes.annotate(shown, (0, y), xytext=(3, 0), textcoords="offset points", va="center", weight="bold", size=9)
            y += 1
        step = {key: 1e3 * value for key, value in row["step_seconds"].items()}
        share = row["exposed_share"]
        exposed = step["median"] * min(1, max(0, share or 0))
        axes.barh(y, step["median"] - exposed, color=WHOLE if share is None else COMPUTE, height=0.72)
        axes.barh(y, exposed, left=step["median"] - exposed, color=EXPOSED, hatch="///", edgecolor="white", height=0.72)
        spread = [[step["median"] - step["q1"]], [step["q3"] - step["median"]]]
        axes.errorbar(step["median"], y, xerr=spread, color="black", capsize=2, linewidth=0.9)
        at = (step["q3"], y)
        axes.annotate(f"{step['median']:.1f}", at, xytext=(5, 0), textcoords="offset points", va="center", size=8)
        ticks.append(y)
        labels.append(row["implementation"])
        y += 1
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set_ylim(y - 0.4, -0.7)
    axes.set_xlim(0, 1.12e3 * max(row["step_seconds"]["q3"] for row in rows))
    axes.set_title(f"{ranks} rank{'s' if ranks > 1 else ''}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
