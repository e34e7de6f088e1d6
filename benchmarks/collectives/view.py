"""Collectives for people: tables by world size, and the lines below them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import terminal
from benchmarks.documents import resume
from benchmarks.documents.collectives import OPS, Collectives, Fit, Row
from benchmarks.words import binary_size, counted, duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MOST = 40  # lines of a table that has every size
# What is known about wrong values: gloo's reduce_scatter, as XLA calls it, overwrites a buffer that it still sends.
RACE = ", at times: gloo's reduce_scatter has a race in XLA (github.com/jax-ml/jax/issues/40830)"


def parts(result: Collectives) -> Iterator[RenderableType]:
    """All that is printed. Where there are many sizes, the tables show three of them."""
    for ranks in result.settings.ranks:
        yield table([row for row in result.rows if row.ranks == ranks], ranks)
        if any(one.ranks == ranks for one in result.fits):
            yield fit_table(result.fits, ranks)
    yield from lines(result)
    yield result.machine.summary()


def table(rows: Sequence[Row], ranks: int) -> Table:
    """Times and bandwidths of one world size: a line for each op and size, columns for each implementation."""
    names = list(dict.fromkeys(row.implementation for row in rows))
    ops, sizes = list(dict.fromkeys(row.op for row in rows)), list(dict.fromkeys(row.bytes for row in rows))
    if len(ops) * len(sizes) > MOST and len(sizes) > 3:
        sizes = [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    by_key = {(row.implementation, row.op, row.bytes, row.mode): row for row in rows}
    bandwidth = "busbw" if ranks > 1 else "algbw"  # there is no bus within one rank
    title = f"{counted(ranks, 'rank')}: single calls; {bandwidth} also for calls back to back (b-to-b)"
    columns = [f"{name}\n{column}" for name in names for column in ("median", "p99", "GB/s", "b-to-b")]
    result = terminal.table(["op"], ["size", *columns], title)
    for op in ops:
        for payload in sizes:
            cells = [op if payload == sizes[0] else "", binary_size(payload)]
            for name in names:
                each, many = (by_key.get((name, op, payload, mode)) for mode in ("per_iteration", "amortized"))
                if each and many:
                    cells += [duration(each.median_s), duration(each.p99_s)]
                    cells += [
                        f"{_rate(one, bandwidth):.3g}" if one.correct else "[red]WRONG[/]" for one in (each, many)
                    ]
                else:
                    cells += [""] * 4
            result.add_row(*cells)
    return result


def _rate(row: Row, bandwidth: str) -> float:
    return row.busbw_GBps if bandwidth == "busbw" else row.algbw_GBps


def fit_table(fits: Sequence[Fit], ranks: int) -> Table:
    """t = alpha + S/beta for one world size, by op and implementation. off by: the median misfit and the largest."""
    names = list(dict.fromkeys(one.implementation for one in fits))
    columns = [f"{name}\n{column}" for name in names for column in ("alpha", "beta", "off by")]
    result = terminal.table(["op"], columns, f"{counted(ranks, 'rank')}: t = alpha + S/beta for single calls")
    mine = [one for one in fits if one.ranks == ranks and one.mode == "per_iteration"]
    by_key = {(one.implementation, one.op): one for one in mine}
    for op in dict.fromkeys(one.op for one in mine):
        cells = [op]
        for name in names:
            if (one := by_key.get((name, op))) is None:
                cells += [""] * 3
                continue
            beta = "-" if one.beta_GBps is None else f"{one.beta_GBps:.3g} GB/s"
            cells += [duration(one.alpha_s), beta, off_by(one)]
        result.add_row(*cells)
    return result


def off_by(fit: Fit) -> str:
    """The median misfit and the largest, of enough sizes."""
    if fit.relative_error is None:
        return "-"
    largest = "" if fit.largest_relative_error is None else f", most {fit.largest_relative_error:.0%}"
    return f"{fit.relative_error:.0%}{largest}"


def lines(result: Collectives) -> list[str]:
    """What stands below the tables."""
    rows, settings = result.rows, result.settings
    told = [result.flat.sentence] if result.flat else []
    if result.floor:
        streams = ", ".join(f"{rate:.3g} GB/s each of {n}" for n, rate in result.floor.loopback_GBps.items())
        copy = f"memory copy {result.floor.memory_copy_GBps:.3g} GB/s"
        told.append(f"Without any collective: {copy}; TCP streams over loopback {streams}.")
    wrong = [row for row in rows if not row.correct]
    identities = counted(len(result.identities), "identity", "identities")
    held = f"{sum(one.holds for one in result.identities)} of {identities}"
    names = ", ".join(dict.fromkeys(one.identity for one in result.identities))
    told.append(f"Values: {len(rows) - len(wrong)} of {counted(len(rows), 'row')} correct; {held} hold: {names}.")
    for row in {_key(row): row for row in wrong}.values():
        gloo = row.implementation == "jax" and settings.device == "cpu"
        why = RACE if gloo and "reduce_scatter" in row.runs_as else ""
        where = f"{row.implementation} {row.op} of {binary_size(row.bytes)} on {counted(row.ranks, 'rank')}"
        told.append(f"WRONG: {where}{why}.")
    others = {(row.implementation, row.op, row.runs_as) for row in rows if row.runs_as != OPS[row.op]}
    for name in sorted({name for name, _, _ in others}):
        ran = ", ".join(f"{op} as {runs_as}" for one, op, runs_as in sorted(others) if one == name)
        told.append(f"{name} runs {ran}.")
    told += bare_lines(rows)
    alone = [row for row in rows if row.mode == "per_iteration"]
    if fewer := [row.iterations for row in alone if row.iterations < settings.iterations]:
        told.append(
            f"{len(fewer)} of {counted(len(alone), 'measurement')} had fewer than {settings.iterations} iterations "
            f"(at least {min(fewer)}), because more would have taken longer than {settings.budget:g} s."
        )
    per_rank = ", ".join(f"{n} in each of {counted(int(m), 'rank')}" for m, n in settings.threads_per_rank.items())
    told.append(f"{settings.transport}; threads: {per_rank}.")
    told += [origin] if (origin := resume.sentence(result.runs)) else []
    return [*told, *result.method]


def bare_lines(rows: Sequence[Row]) -> list[str]:
    """busbw of the benchmark over that of a bare loop around the same call, where that was measured."""
    bare = {_key(row): row.busbw_GBps for row in rows if row.mode == "bare" and row.busbw_GBps}
    result = []
    for mode, name in product(("amortized", "per_iteration"), dict.fromkeys(name for name, *_ in bare)):
        mine = [row for row in rows if (row.mode, row.implementation) == (mode, name) and _key(row) in bare]
        ratios = {_key(row): row.busbw_GBps / bare[_key(row)] for row in mine}
        if not ratios:
            continue
        least = min(ratios, key=lambda key: ratios[key])
        result.append(
            f"busbw {mode} / bare loop: {name} median {median(ratios.values()):.2f} of {len(ratios)}, "
            f"{sum(ratio >= 0.95 for ratio in ratios.values())} at 0.95 or more, "
            f"lowest {ratios[least]:.2f} ({least[1]} on {least[2]} ranks at {binary_size(least[3])})."
        )
    return result


def _key(row: Row) -> tuple[Any, ...]:
    return row.implementation, row.op, row.ranks, row.bytes
