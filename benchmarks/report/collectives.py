"""The chapter on collectives."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.collectives import view
from benchmarks.documents.collectives import Collectives
from benchmarks.report import pictures
from benchmarks.report.blocks import Block, Details, Items, from_rich
from benchmarks.report.pictures import Draw
from benchmarks.words import binary_size, counted


def summary(result: Collectives) -> Iterator[str]:
    if result.flat:
        yield result.flat.sentence
    measured = [row for row in result.rows if row.mode == "per_iteration" and row.busbw_GBps]
    if measured:
        best = max(measured, key=lambda row: row.busbw_GBps)
        where = f"{best.implementation} {best.op} of {binary_size(best.bytes)} on {counted(best.ranks, 'rank')}"
        copy = f"; a copy in memory reaches {result.floor.memory_copy_GBps:.3g} GB/s" if result.floor else ""
        yield f"The highest busbw is {best.busbw_GBps:.3g} GB/s ({where}){copy}."


def blocks(result: Collectives, draw: Draw) -> Iterator[Block]:
    if result.rows:
        text = "busbw of each collective over its payload, with the fit of t = alpha + S/beta and loopback's bandwidth"
        yield from draw("bandwidth", text, lambda path: pictures.bandwidth(result, path))
    tables = []
    for ranks in result.settings.ranks:
        rows = [row for row in result.rows if row.ranks == ranks]
        if any(one.ranks == ranks for one in result.fits):
            yield from_rich(view.fit_table(result.fits, ranks))
        if rows:
            tables.append(from_rich(view.table(rows, ranks)))
    yield from (Details(f"Times and bandwidths: {table.title}", [table]) for table in tables)
    lines = view.lines(result)
    yield Details("How it was measured", [Items(lines[bool(result.flat) :])])  # the first sentence stands on top
