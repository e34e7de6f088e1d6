"""Expert imbalance for people: a table, and sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks import terminal
from benchmarks.documents.experts import Imbalance, Row
from benchmarks.experts.skewed import DROPPING, OURS, SPARSE
from benchmarks.words import counted

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def parts(result: Imbalance) -> Iterator[RenderableType]:
    """All that is printed."""
    yield table(result)
    yield from result.failures
    yield from notes(result)
    yield result.machine.summary()


def table(result: Imbalance) -> Table:
    """One line for each skew."""
    numbers = ["skew", "busiest expert", "busiest rank", "factor", "torch ms", "/ even"]
    numbers += ["all_to_all ms", "/ even", "factor 1 ms", "dropped"]
    made = terminal.table(["ranks"], numbers)
    made.columns[0].justify = "right"
    for row in result.rows:

        def cells(name: str, row: Row = row) -> tuple[str, str]:
            return f"{1e3 * row.contestants[name].median:.1f}", f"{row.over_even[name].median:.2f}"

        made.add_row(
            str(row.ranks),
            f"{row.skew:g}",
            f"{row.busiest_expert:.2f}",
            f"{row.busiest_rank:.2f}",
            f"{row.capacity_factor:.2f}",
            *cells(OURS),
            *cells(SPARSE),
            cells(DROPPING)[0],
            f"{row.dropped:.1%}",
        )
    return made


def notes(result: Imbalance) -> Iterator[str]:
    """How to read the table."""
    yield (
        "Tokens of the busiest expert and rank are over the mean of all. With the capacity factor beside them nothing "
        "is dropped; with 1, the share of choices in the last column is. all_to_all sends the tokens that there are"
    )
    iterations = counted(result.settings.iterations, "iteration")
    yield f"{result.settings}; medians of {iterations}, the slowest rank; / even: over the same with the first skew"
