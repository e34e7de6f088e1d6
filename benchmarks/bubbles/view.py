"""The bubble of a pipeline for people: a table, the lines below it, and the timelines for a trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks import terminal
from benchmarks.documents import resume
from benchmarks.documents.bubbles import Bubbles, Event, Row
from benchmarks.words import counted
from shardiff.system.words import size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def parts(result: Bubbles) -> Iterator[RenderableType]:
    """All that is printed."""
    yield table(result)
    yield from (f"{one.reason}: not measured" for one in result.skipped)
    yield from notes(result)
    yield result.machine.summary()


def titled(result: Bubbles) -> dict[str, list[Event]]:
    """The timelines under the names that a trace shows."""
    return {
        f"{one.implementation}, {one.order}, {one.stages} stages, {one.microbatches} microbatches": one.events
        for one in result.timelines
    }


def table(result: Bubbles) -> Table:
    """One line for each run."""
    numbers = ["p", "m", "formula", "measured", "quartiles", "ratio", "weighted", "kept", "ratio", "step ms"]
    made = terminal.table(["implementation", "schedule"], numbers, gap=1)
    for row in result.rows:
        measured = row.measured
        made.add_row(
            row.implementation,
            f"{row.order}, paced" if row.paced else row.order,
            str(row.stages),
            str(row.microbatches),
            f"{row.theory:.3f}",
            f"{measured.median:.3f}",
            f"{measured.q1:.3f} - {measured.q3:.3f}",
            f"{row.of_theory:.2f}",
            f"{row.weighted.median:.3f}" if row.weighted else "-",
            *kept(row),
            f"{1e3 * row.step_seconds.median:.1f}",
        )
    return made


def kept(row: Row) -> tuple[str, str]:
    """The activations of the stage that keeps most, and their share of the closed form; XLA's temporaries for JAX."""
    if row.kept and row.kept_theory:
        return size(max(row.kept)), f"{max(row.kept) / max(row.kept_theory):.2f}"
    return (size(row.temporaries), "-") if row.temporaries is not None else ("-", "-")


def notes(result: Bubbles) -> Iterator[str]:
    """What the numbers are, the fits, and the sizes."""
    yield (
        "torch: idle stage-time over total stage-time, from timelines; weighted: the bubble of the same schedule, "
        "replayed with the measured durations and free communication"
    )
    if any(row.framework == "jax" for row in result.rows):
        yield (
            "shard_map, annotated: the share of the step in which a stage does not do its own work, that is, bubble "
            "and communication"
        )
    if any(row.kept for row in result.rows):
        yield (
            "kept: the most bytes of activations at any time, on the stage that keeps most; for compiled programs what "
            "XLA plans for all that lives within a step"
        )
    for paced in dict.fromkeys(row.paced for row in result.rows if row.paced):
        late = sum(row.repeated for row in result.rows if row.paced == paced)
        yield (
            f"paced: each stage on a device of {paced / 1e9:.3g} GFLOP/s, with an eighth of batch and width; "
            f"{counted(late, 'sample')} repeated because the CPU was late"
        )
    for fit in result.fits:
        yield (
            f"{fit.implementation}, p = {fit.stages}: step = {1e3 * fit.work_seconds:.1f} ms (m+p-1)/m + "
            f"{1e3 * fit.tick_seconds:.2f} ms (m+p-1), within {100 * fit.worst_residual:.0f} %"
        )
    if origin := resume.sentence(result.runs):
        yield origin
    yield f"{result.settings}, {result.settings.iterations} steps"
