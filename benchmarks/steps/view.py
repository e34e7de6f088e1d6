"""Training steps for people: tables of step times, of their ratios and of a single device's rates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks import terminal
from benchmarks.documents import resume
from benchmarks.documents.fields import Spread
from benchmarks.documents.steps import OnMesh, Row, Steps
from benchmarks.steps import why
from shardiff.system.words import size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def parts(result: Steps) -> Iterator[RenderableType]:
    """All that is printed."""
    yield step_table(result)
    if result.ratios:
        yield ratio_table(result)
    if recomputed(result):
        yield recompute_table(result)
    if result.single_device:
        yield rate_table(result)
    yield from result.failures
    yield from left_out(result)
    yield from why.reasons(result)
    yield setting(result)
    if origin := resume.sentence(result.runs):
        yield origin
    yield result.machine.summary()


def setting(result: Steps) -> str:
    """Sizes and method in a line."""
    s = result.settings
    rounds = f"{s.iterations} iterations in {s.rounds} rounds in which torch and JAX take turns"
    pipeline = f"pipeline in {s.microbatches} microbatches, {s.schedule}"
    told = [f"{s}, {s.optimizer}", pipeline, rounds, "medians of the slowest rank"]
    if s.reshard is not None:
        told.insert(1, f"gathered layers are {'gathered again' if s.reshard else 'kept'} for the backward pass")
    return "; ".join(told)


def step_table(result: Steps) -> Table:
    """One line for each contestant."""
    numbers = ["step ms", "quartiles", "compute", "exposed", "held", "formula", "wire"]
    made = terminal.table(["strategy", "ranks", "implementation"], numbers)
    made.columns[0].no_wrap = False  # the strategies of a mesh stand below each other in a narrow terminal
    made.columns[1].justify = "right"
    shown = None
    for row in result.rows:
        held = row.memory.measured.state
        formula = row.memory.closed_form.state if row.memory.closed_form else None
        step, where = row.step_seconds, row.key
        made.add_row(
            *(cells(row) if where != shown else ("", "")),
            row.label,
            ms(step.median),
            f"{ms(step.q1)} - {ms(step.q3)}",
            *(ms(part.median) if part else "-" for part in (row.compute_seconds, row.exposed_seconds)),
            size(held) if held is not None else "-",
            f"{held / formula:.2f}" if held is not None and formula else "-",
            size(row.wire_bytes) if row.wire_bytes is not None else "-",
        )
        shown = where
    return made


def left_out(result: Steps) -> Iterator[str]:
    """Which library equivalents took no part, and why."""
    for one in result.left_out:
        yield f"{one.implementation} of {one.strategy} on {one.on} was left out: {one.reason}"


def recomputed(result: Steps) -> list[tuple[Row, Row]]:
    """Every row that recomputes, after the row of the same contestant that does not."""
    plain = {(row.key, row.implementation): row for row in result.rows if row.recompute == "none"}
    pairs = [(plain.get((row.key, row.implementation)), row) for row in result.rows if row.recompute != "none"]
    return [(before, row) for before, row in pairs if before is not None]


def recompute_table(result: Steps) -> Table:
    """What is computed again: time, memory and bytes over those of the same step that keeps everything.

    "predicted" is the ratio of the products' operations. Activations are what autograd keeps, and "formula" is what it
    keeps over the closed form; of XLA they are its temporaries.
    """
    numbers = ["step", "predicted", "activations", "formula", "wire", "compiled"]
    made = terminal.table(["strategy", "ranks", "implementation"], numbers, gap=1)
    made.columns[0].no_wrap = False
    shown = None
    ratios = {(r.key, r.of): r.ratio.median for r in result.ratios}
    for before, row in recomputed(result):
        kept, predicted = [one.memory.measured for one in (before, row)], "-"
        if before.product_flops and row.product_flops:
            predicted = f"{row.product_flops / before.product_flops:.2f}"
        time = ratios.get((row.key, f"{row.implementation} {row.recompute}"))
        measured = [held.activations if row.framework == "torch" else held.temporaries for held in kept]
        formula = row.memory.closed_form.activations if row.memory.closed_form else None
        known = row.framework == "torch" and measured[1] is not None and formula
        made.add_row(
            *(cells(row) if row.key != shown else ("", "")),
            row.label,
            f"{time:.2f}" if time is not None else "-",
            predicted,
            change(*measured),
            f"{(measured[1] or 0) / formula:.2f}" if known and formula else "-",
            *(change(b, r) for b, r in ((before.wire_bytes, row.wire_bytes), compiled(before, row))),
        )
        shown = row.key
    return made


def compiled(before: Row, row: Row) -> tuple[int | None, int | None]:
    """The wire bytes of both compiled programs."""
    return before.wire_bytes_compiled, row.wire_bytes_compiled


def change(before: int | None, after: int | None) -> str:
    """`12 MB to 4 MB`, or one size if there is no change."""
    if before is None or after is None:
        return "-"
    return size(after) if before == after else f"{size(before)} to {size(after)}"


def cells(row: OnMesh) -> tuple[str, str]:
    """The strategy and where it runs. Several strategies take a line each, beside their axes."""
    return row.strategy.replace(" x ", " x\n"), row.place.replace(",", "\n")


def ratio_table(result: Steps) -> Table:
    """One line for each pair of contestants."""
    made = terminal.table(["strategy", "ranks", "step time of", "over"], ["ratio", "quartiles", "by"])
    made.columns[0].no_wrap = False  # the strategies of a mesh stand below each other in a narrow terminal
    made.columns[1].justify = "right"
    for row in result.ratios:
        ratio = row.ratio
        made.add_row(*cells(row), row.of, row.to, f"{ratio.median:.2f}", f"{ratio.q1:.2f} - {ratio.q3:.2f}", row.by)
    return made


def rate_table(result: Steps) -> Table:
    """A single device: the passes' share of the matrix-product rate, and the update's share of the copy bandwidth."""
    numbers = ["matmul GFLOP/s", "passes GFLOP/s", "share", "copy GB/s", "update GB/s", "share"]
    made = terminal.table(["single device"], numbers)

    def giga(rate: Spread) -> str:
        return f"{rate.median / 1e9:.1f}"

    for row in result.single_device:
        passes = [giga(row.matmul_flops_per_second), giga(row.forward_backward_flops_per_second)]
        update = [giga(row.copy_bytes_per_second), giga(row.update_bytes_per_second)]
        shares = [f"{share.median:.2f}" for share in (row.share, row.update_share)]
        made.add_row(f"{row.framework}, batch {row.batch}", *passes, shares[0], *update, shares[1])
    return made


def ms(seconds: float) -> str:
    """Milliseconds."""
    return f"{1e3 * seconds:.1f}"
