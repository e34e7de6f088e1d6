"""The diff of a strategy for people: its three columns, and one picture for several targets."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.diff_strategies import StrategyDiff
from shardiff.diff.view import COLOURS, OTHER, notes, table
from shardiff.record import PHASES, Record, step_bytes, totals
from shardiff.system.files import save
from shardiff.system.words import size

if TYPE_CHECKING:
    from rich.console import RenderableType

SIDES = ("written", "derived")


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is going on, while it does; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as shown:
        task = shown.add_task("")
        yield lambda text: shown.update(task, description=text)


def show(diffs: Sequence[StrategyDiff], as_json: bool) -> None:
    """Print the diffs, one JSON object a line or as tables."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)
    for one in diffs:
        if as_json:
            print(json.dumps(one.to_json()))
            continue
        problem = one.run.problem
        sizes = f"batch {problem.batch}, width {problem.width}, {problem.layers} layers, {problem.dtype}"
        console.print(
            f"[bold]{one.run.strategy}, {one.run.implementation}, for {one.target} ({one.run.mesh}): {sizes}[/]"
        )
        for part in tables(one):
            console.print(part)
        console.print()


def pictures(diffs: Sequence[StrategyDiff], path: Path) -> None:
    """A picture for each strategy; where there are several, each file's name says of which."""
    for strategy, group in itertools.groupby(diffs, lambda one: one.run.strategy):
        several = diffs[0].run.strategy != diffs[-1].run.strategy
        picture(list(group), path.with_stem(f"{path.stem}_{strategy}") if several else path)


def tables(one: StrategyDiff) -> list[RenderableType]:
    """The rows in phases, then the three columns of totals, then a sentence for each rule."""
    return [table(one.diff.rows, SIDES), totals_table(one), sentences(one)]


def totals_table(one: StrategyDiff) -> RenderableType:
    """Calls, payload and wire bytes of a rank in one step: traced, derived, closed form, and the ratios to the last."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    result = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    result.add_column("of a rank in one step")
    for name in ("calls", "payload", "wire bytes", "of closed form"):
        result.add_column(name, justify="right")
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
    """What a device computes and moves beside communicating, in a line of its own; "" where it was not read."""
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
    sizes = f"batch {run.problem.batch}, width {run.problem.width}, {run.problem.layers} layers, {run.problem.dtype}"
    axes.set_title(
        f"{run.strategy}: written in torch, derived by XLA from {run.implementation} JAX\n{sizes}", loc="left"
    )
    legend = [Patch(facecolor=colour, label=op) for op, colour in used.items()]
    legend.append(Patch(facecolor="#bbbbbb", edgecolor="white", hatch="///", label="in the backward pass"))
    figure.legend(handles=legend, loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)
