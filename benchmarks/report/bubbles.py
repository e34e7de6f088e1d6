"""The chapter on the pipeline's bubble."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.bubbles import picture, view
from benchmarks.documents.bubbles import Bubbles
from benchmarks.report.blocks import Block, Details, Items, from_rich
from benchmarks.report.pictures import Draw
from benchmarks.words import counted


def summary(result: Bubbles) -> Iterator[str]:
    for stages in dict.fromkeys(row.stages for row in result.rows):
        mine = [row for row in result.rows if row.stages == stages and row.implementation == "torch"]
        if not mine:
            continue
        first, last = mine[0], mine[-1]
        shares = [row.of_theory for row in mine]
        yield (
            f"In torch, the bubble of {counted(stages, 'stage')} takes {first.measured.median:.0%} of the stages' time "
            f"with {counted(first.microbatches, 'microbatch', 'microbatches')} and {last.measured.median:.0%} with "
            f"{last.microbatches}; the closed form gives {first.theory:.0%} and {last.theory:.0%}. Measured over "
            f"closed form: {min(shares):.2f} to {max(shares):.2f}."
        )
    yield from (f"{one.reason}: not measured." for one in result.skipped)


def blocks(result: Bubbles, draw: Draw) -> Iterator[Block]:
    if result.rows:
        text = "Timelines of the stages, in which the bubble is hatched, and measured bubbles beside the closed form"
        yield from draw("bubbles", text, lambda path: picture.picture(result, path))
    yield from_rich(view.table(result))
    yield Items(list(view.notes(result)))
    yield Details("How it was measured", [Items([f"{name}: {how}." for name, how in result.method.items()])])
