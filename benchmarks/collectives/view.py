"""Collectives for people: tables by world size, the lines below them, and one picture of busbw over size."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.collectives.timing import OPS
from benchmarks.documents import resume
from shardiff.diff.view import COLOURS, OTHER
from shardiff.system import machine
from shardiff.system.files import save

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]

MOST = 40  # lines of a table that has every size
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
# What is known of wrong values: gloo's reduce_scatter, as XLA calls it, overwrites a buffer that it is still sending.
RACE = ", at times: gloo's reduce_scatter in XLA has a race (github.com/jax-ml/jax/issues/40830)"


def size(count: float) -> str:
    """Bytes in binary units, as sizes are given: 16 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError("the loop returns")


def duration(seconds: float) -> str:
    """Three digits: 12.3 us."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def show(document: dict[str, Any]) -> None:
    """Print everything but the rows that a table has no room for."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    for ranks in document["settings"]["ranks"]:
        shown = [row for row in document["rows"] if row["ranks"] == ranks]
        console.print(table(shown, ranks))
        if any(one["ranks"] == ranks for one in document["fits"]):
            console.print(fit_table(document["fits"], ranks))
    for line in lines(document):
        console.print(line, markup=False)


def table(rows: Sequence[Row], ranks: int) -> Table:
    """Times and bandwidths of one world size: a line for each op and size, columns for each implementation."""
    names, ops, sizes = ([*dict.fromkeys(row[key] for row in rows)] for key in ("implementation", "op", "bytes"))
    if len(ops) * len(sizes) > MOST and len(sizes) > 3:
        sizes = [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    by_key = {(row["implementation"], row["op"], row["bytes"], row["mode"]): row for row in rows}
    bandwidth = "busbw" if ranks > 1 else "algbw"  # there is no bus within one rank
    result = _table(f"{_ranks(ranks)}: one call by itself; {bandwidth} also back to back (b-to-b)", "op", "size")
    for column in (f"{name}\n{column}" for name in names for column in ("median", "p99", "GB/s", "b-to-b")):
        result.add_column(column, justify="right", no_wrap=True)
    for op in ops:
        for payload in sizes:
            cells = [op if payload == sizes[0] else "", size(payload)]
            for name in names:
                each, many = (by_key.get((name, op, payload, mode)) for mode in ("per_iteration", "amortized"))
                if each and many:
                    cells += [duration(each["median_s"]), duration(each["p99_s"])]
                    cells += [f"{each[f'{bandwidth}_GBps']:.3g}" if each["correct"] else "[red]WRONG[/]"]
                    cells += [f"{many[f'{bandwidth}_GBps']:.3g}"]
                else:
                    cells += [""] * 4
            result.add_row(*cells)
    return result


def fit_table(fits: Sequence[Row], ranks: int) -> Table:
    """t = alpha + S/beta of one world size, per op and implementation. off by: the median relative misfit."""
    names = list(dict.fromkeys(one["implementation"] for one in fits))
    result = _table(f"{_ranks(ranks)}: t = alpha + S/beta of one call by itself", "op")
    for column in (f"{name}\n{column}" for name in names for column in ("alpha", "beta", "off by")):
        result.add_column(column, justify="right", no_wrap=True)
    mine = [one for one in fits if one["ranks"] == ranks and one["mode"] == "per_iteration"]
    by_key = {(one["implementation"], one["op"]): one for one in mine}
    for op in dict.fromkeys(one["op"] for one in mine):
        cells = [op]
        for name in names:
            if (one := by_key.get((name, op))) is None:
                cells += [""] * 3
                continue
            beta = "-" if one["beta_GBps"] is None else f"{one['beta_GBps']:.3g} GB/s"
            cells += [duration(one["alpha_s"]), beta, f"{one['relative_error']:.0%}"]
        result.add_row(*cells)
    return result


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    for column in columns:
        result.add_column(column, justify="right" if column == "size" else "left", no_wrap=True)
    return result


def lines(document: dict[str, Any]) -> list[str]:
    """What stands below the tables."""
    rows, settings, floor = document["rows"], document["settings"], document["floor"]
    result = [document["flat"]["sentence"]] if document["flat"] else []
    streams = ", ".join(f"{one} GB/s each of {n}" for n, one in _rounded(floor["loopback_GBps"]).items())
    result.append(f"Floor: memory copy {floor['memory_copy_GBps']:.3g} GB/s; TCP streams over loopback {streams}.")
    held = sum(one["holds"] for one in document["identities"])
    wrong = [row for row in rows if not row["correct"]]
    names = ", ".join(dict.fromkeys(one["identity"] for one in document["identities"]))
    right = f"{len(rows) - len(wrong)} of {len(rows)} rows right"
    result.append(f"Values: {right}; {held} of {len(document['identities'])} hold: {names}.")
    for row in wrong:
        if row["mode"] == "per_iteration":
            gloo = row["implementation"] == "jax" and settings["device"] == "cpu"
            why = RACE if gloo and "reduce_scatter" in row["runs_as"] else ""
            where = f"{row['implementation']} {row['op']} of {size(row['bytes'])} on {row['ranks']} ranks"
            result.append(f"WRONG: {where}{why}.")
    others = {(row["implementation"], row["op"], row["runs_as"]) for row in rows if row["runs_as"] != OPS[row["op"]]}
    for name in sorted({name for name, _, _ in others}):
        ran = ", ".join(f"{op} as {runs_as}" for one, op, runs_as in sorted(others) if one == name)
        result.append(f"{name} runs {ran}.")
    result += bare_lines(rows)
    fewer = [row for row in rows if row["mode"] == "per_iteration" and row["iterations"] < settings["iterations"]]
    if fewer:
        count = f"{len(fewer)} of {sum(row['mode'] == 'per_iteration' for row in rows)}"
        least = min(row["iterations"] for row in fewer)
        result.append(
            f"{count} measurements had fewer than {settings['iterations']} iterations (at least {least}) "
            f"because they would have taken more than {settings['budget']:g} s."
        )
    per_rank = ", ".join(f"{count} in each of {_ranks(int(n))}" for n, count in settings["threads_per_rank"].items())
    result.append(f"{settings['transport']}; threads: {per_rank}.")
    result += [origin] if (origin := resume.sentence(document)) else []
    return [*result, *document["method"], machine.summary(document["machine"])]


def bare_lines(rows: Sequence[Row]) -> list[str]:
    """busbw of the harness over that of a bare loop around the same call, where that was measured."""
    bare = {_key(row): row["busbw_GBps"] for row in rows if row["mode"] == "bare" and row["busbw_GBps"]}
    result = []
    for mode, name in product(("amortized", "per_iteration"), dict.fromkeys(name for name, *_ in bare)):
        mine = [row for row in rows if (row["mode"], row["implementation"]) == (mode, name) and _key(row) in bare]
        ratios = {_key(row): row["busbw_GBps"] / bare[_key(row)] for row in mine}
        least = min(ratios, key=lambda key: ratios[key])
        result.append(
            f"busbw {mode} / bare loop: {name} median {median(ratios.values()):.2f} of {len(ratios)}, "
            f"{sum(ratio >= 0.95 for ratio in ratios.values())} at 0.95 or more, "
            f"lowest {ratios[least]:.2f} ({least[1]} on {least[2]} ranks at {size(least[3])})."
        )
    return result


def _key(row: Row) -> tuple[Any, ...]:
    return row["implementation"], row["op"], row["ranks"], row["bytes"]


def _rounded(numbers: dict[str, float]) -> dict[str, str]:
    return {name: f"{number:.3g}" for name, number in numbers.items()}


def picture(document: dict[str, Any], path: Path) -> None:
    """busbw of one call by itself over payload, a panel for each world size: a PNG. algbw where only one rank ran."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    rows = [row for row in document["rows"] if row["mode"] == "per_iteration"]
    name_of = "busbw" if any(row["busbw_GBps"] for row in rows) else "algbw"
    rows = [row for row in rows if row[f"{name_of}_GBps"]]
    over_loopback = document["settings"]["device"] == "cpu" and name_of == "busbw"
    counts = sorted({row["ranks"] for row in rows})
    figure = Figure(figsize=(max(6.4, 4.6 * len(counts)), 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    curves: dict[tuple[int, str, str], list[tuple[int, float]]] = {}
    for row in rows:
        point = row["bytes"], row[f"{name_of}_GBps"]
        curves.setdefault((row["ranks"], row["op"], row["implementation"]), []).append(point)
    for axes, ranks in zip(panels, counts, strict=True):
        if over_loopback:
            axes.axhline(document["floor"]["loopback_GBps"][str(ranks)], color=OTHER, linewidth=3, alpha=0.6, zorder=1)
        for (count, op, name), points in curves.items():
            if count == ranks:
                axes.plot(*zip(*sorted(points), strict=True), LINE[name], **_marks(op))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = sorted({row["bytes"] for row in rows})
        axes.xaxis.set_major_locator(FixedLocator(sizes[:: -(-len(sizes) // 6)]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.tick_params(axis="x", labelsize=8)
        axes.set_title(_ranks(ranks), loc="left")
        axes.set_xlabel("payload S")
        axes.grid(True, color="#e5e5e5", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"{name_of} in GB/s (1e9 bytes a second)")
    ops, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("op", "implementation"))
    legend = [Line2D([], [], linestyle="-", label=op, **_marks(op)) for op in ops]
    legend += [Line2D([], [], linestyle=LINE[name], color="#333333", label=name) for name in names]
    if over_loopback:
        legend.append(Line2D([], [], color=OTHER, linewidth=3, alpha=0.6, label="TCP over loopback, a stream per rank"))
    figure.legend(
        handles=legend, loc="outside lower center", ncols=5 if len(counts) > 1 else 3, frameon=False, fontsize=8.5
    )
    facts, transport = document["machine"], document["settings"]["transport"]
    where = f"{facts['cpu']}, {facts['cores']} cores, {facts['date'][:10]}"
    figure.suptitle(
        f"{name_of} of one collective by itself, median; {transport}\n{where}", x=0.01, ha="left", fontsize=11
    )
    save(figure, path)


def _marks(op: str) -> dict[str, Any]:
    fill = "white" if op in ROOTED else COLOUR[op]
    return {"color": COLOUR[op], "marker": "o", "markersize": 4, "markerfacecolor": fill, "linewidth": 1.3}
