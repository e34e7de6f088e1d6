"""The chapter on popular experts."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.documents.experts import Imbalance
from benchmarks.experts import view
from benchmarks.experts.skewed import OURS, SPARSE
from benchmarks.report.blocks import Block, Details, Items, from_rich
from benchmarks.report.pictures import Draw
from benchmarks.words import counted


def summary(result: Imbalance) -> Iterator[str]:
    for ranks in dict.fromkeys(row.ranks for row in result.rows):
        row = max((row for row in result.rows if row.ranks == ranks), key=lambda row: row.skew)
        yield (
            f"On {counted(ranks, 'rank')}, where the busiest expert has {row.busiest_expert:.1f} times the mean, slots "
            f"for all tokens take {row.over_even[OURS].median:.2f} times the time of even experts, and sending only "
            f"the tokens that there are {row.over_even[SPARSE].median:.2f} times; without more slots, "
            f"{row.dropped:.0%} of the choices are dropped."
        )
    yield from (f"Computed differently: {failure}." for failure in result.failures)


def blocks(result: Imbalance, draw: Draw) -> Iterator[Block]:
    yield from_rich(view.table(result))
    yield Items(list(view.notes(result)))
    yield Details("How it was measured", [Items([f"{name}: {how}." for name, how in result.method.items()])])
