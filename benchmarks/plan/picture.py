"""Step time over the rate of the links: one line for each mesh that is the fastest somewhere, the crossovers marked."""

from __future__ import annotations

from pathlib import Path

from benchmarks.plan.plan import Plan, label
from contract.planner.crossings import FACTORS, with_rate
from contract.planner.predict import seconds_of
from contract.strategy import Run
from shardiff.system.files import save

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")  # Okabe and Ito's
POINTS = 33
MOST_LINES = 8


def picture(answer: Plan, path: Path) -> None:
    """Draw. Where no crossovers were looked for, the lines are those of the first meshes of the table."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    network = answer.machine.network
    rate = getattr(network, answer.level).bandwidth
    low, high = rate * FACTORS[0], rate * FACTORS[-1]
    rates = [low * (high / low) ** (i / (POINTS - 1)) for i in range(POINTS)]
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for run, colour in zip(lines_of(answer), COLOURS, strict=False):
        times = [1e3 * seconds_of(run, with_rate(answer.machine, answer.level, one)) for one in rates]
        axes.plot([one / 1e9 for one in rates], times, color=colour, linewidth=1.6, label=label(run))
    for crossing in answer.links or ():
        axes.plot(crossing.at / 1e9, 1e3 * crossing.seconds, "o", color="black", markersize=6, zorder=5)
        axes.annotate(
            f"{crossing.at / 1e9:.3g}",
            (crossing.at / 1e9, 1e3 * crossing.seconds),
            textcoords="offset points",
            xytext=(0, -14),
            ha="center",
            fontsize=8,
        )
    axes.axvline(rate / 1e9, color="#808080", linewidth=1, linestyle=":")
    axes.annotate(
        f" {answer.machine}", (rate / 1e9, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8, color="#505050"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    what = "of the links of one host to the others" if answer.level == "between" else "of the links of one device"
    axes.set_xlabel(f"rate {what}, GB/s each way")
    axes.set_ylabel("predicted step, ms")
    axes.grid(True, which="both", color="#e4e4e4", linewidth=0.5)
    axes.legend(frameon=False, fontsize=8, title="the fastest meshes; dots: crossovers" if answer.links else None)
    axes.spines[["top", "right"]].set_visible(False)
    problem = answer.asked.problem
    axes.set_title(
        f"Which mesh is the fastest depends on the links: batch {problem.batch:,}, width {problem.width:,}, "
        f"{problem.layers} layers, {problem.dtype}",
        loc="left",
        fontsize=10,
    )
    save(figure, path)


def lines_of(answer: Plan) -> list[Run]:
    """The meshes to draw: those that win somewhere, then the first of the table."""
    runs = [run for one in answer.links or () for run in (one.before, one.after)]
    runs += [] if answer.links else [one.run for one in answer.ranking.best]
    return list({(run.axes, run.microbatches, run.schedule): run for run in runs}.values())[:MOST_LINES]
