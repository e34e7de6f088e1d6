"""The chapter on the pipeline's bubble."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.bubbles import picture, view
from benchmarks.documents.bubbles import Bubbles, Row
from benchmarks.report.blocks import Block, Details, Items, from_rich
from benchmarks.report.pictures import Draw
from benchmarks.words import counted


def summary(result: Bubbles) -> Iterator[str]:
    for stages in dict.fromkeys(row.stages for row in result.rows):
        here = [row for row in result.rows if row.stages == stages and row.implementation == "torch"]
        yield from of_schedules(here)
        mine = [row for row in here if row.order == "gpipe" or (row.order == "naive" and row.microbatches == 1)]
        if not mine:
            continue
        first, last = mine[0], mine[-1]
        shares = [row.of_theory for row in mine]
        yield (
            f"In GPipe's order, the bubble of torch's {counted(stages, 'stage')} takes {first.measured.median:.0%} of "
            f"the stages' time with {counted(first.microbatches, 'microbatch', 'microbatches')} and "
            f"{last.measured.median:.0%} with {last.microbatches}; the closed form gives {first.theory:.0%} and "
            f"{last.theory:.0%}. Measured over closed form: {min(shares):.2f} to {max(shares):.2f}."
        )
    yield from (f"{one.reason}: not measured." for one in result.skipped)


def of_schedules(rows: list[Row]) -> Iterator[str]:
    """The schedules by their bubble, of the largest number of microbatches."""
    most = max((row.microbatches for row in rows), default=0)
    mine = sorted((row for row in rows if row.microbatches == most), key=lambda row: row.measured.median)
    if len(mine) > 1:
        shares = ", ".join(f"{row.order} {row.measured.median:.1%}" for row in mine)
        microbatches = counted(most, "microbatch", "microbatches")
        yield f"Bubbles of {counted(mine[0].stages, 'stage')} with {microbatches}: {shares}."


def blocks(result: Bubbles, draw: Draw) -> Iterator[Block]:
    if result.rows:
        text = "Timelines of the stages, in which the bubble is hatched, and measured bubbles beside the closed form"
        yield from draw("bubbles", text, lambda path: picture.picture(result, path))
    yield from_rich(view.table(result))
    yield Items(list(view.notes(result)))
    yield Details("How it was measured", [Items([f"{name}: {how}." for name, how in result.method.items()])])
