"""Bytes that really pass the interfaces, beside the optimal ones: `shardiff bench collectives --wire`.

Every rank, of torch or of JAX over gloo, runs in a network namespace of its own (`benchmarks.lab`), so its interface
carries the collective's bytes and nothing else. The links have a stated rate; how much longer a collective takes than
the optimal bytes would shows what the library does not send both ways at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import terminal
from benchmarks.documents.collectives import OPS
from benchmarks.lab.lab import open_lab
from benchmarks.lab.namespaces import GOODPUT, Shape
from benchmarks.words import binary_size, counted, duration
from shardiff.record import wire_bytes
from shardiff.system import machine

if TYPE_CHECKING:
    from rich.console import RenderableType

RATE = 200e6  # bit/s
TRAFFIC, OF_JAX = "benchmarks.lab.traffic", "benchmarks.collectives.jax_wire"  # modules that ranks call
# Beside the library's: the same values in other ways. -> the op whose optimal bytes they are compared with.
VARIANTS = {
    "collective_permute, send first": "collective_permute",
    "all_to_all by messages": "all_to_all",
    "reduce_scatter by all_to_all": "reduce_scatter",
    "reduce_scatter by messages": "reduce_scatter",
}

Document = dict[str, Any]


def measure(
    ops: Sequence[str],
    ranks: Sequence[int],
    size: int,
    iterations: int,
    frameworks: Sequence[str],
    starting: Callable[[str], object],
) -> Document:
    """The document. ops: as in `shardiff bench collectives`; size: payload in bytes; frameworks: torch, jax.

    Raises LabError.
    """
    names = [OPS[op] for op in ops]
    names += [name for name, of in VARIANTS.items() if of in names]
    rows = []
    for n in ranks:
        starting(f"{counted(n, 'rank')}: network namespaces")
        with open_lab(Shape(1, n)) as lab:
            lab.rates(RATE, None)
            payload = size // (4 * n) * 4 * n
            for name in names if "torch" in frameworks else ():
                starting(f"{name} on {counted(n, 'rank')}")
                rows.append(row(name, n, payload, lab.call(TRAFFIC, "collective", name, size, iterations, n)))
            for op in ops if "jax" in frameworks else ():
                starting(f"JAX's {op} on {counted(n, 'rank')}")
                answers = lab.call(OF_JAX, "collective", op, payload, iterations)
                rows.append(row(OPS[op], n, payload, answers, "jax"))
    return {
        "kind": "wire",
        "schema": 1,
        "machine": machine.facts(),
        "settings": {"bits_per_second": RATE, "iterations": iterations, "transport": "gloo"},
        "rows": rows,
    }


def row(
    name: str, ranks: int, size: int, answers: Sequence[tuple[list[float], int]], framework: str = "torch"
) -> Document:
    """One collective: bytes that every rank sent; those of the busiest over the optimal ones, its time over theirs."""
    optimal = wire_bytes(VARIANTS.get(name, name), size, ranks)
    seconds = median(max(each[0][i] for each in answers) for i in range(len(answers[0][0])))
    sent = [each[1] for each in answers]
    return {
        "framework": framework,
        "op": name,
        "ranks": ranks,
        "bytes": size,
        "optimal_bytes": optimal,
        "sent_bytes": sent,
        "bytes_over_optimal": max(sent) * GOODPUT / optimal,
        "seconds": seconds,
        "seconds_over_optimal": seconds / (optimal / (RATE / 8 * GOODPUT)),
    }


def parts(document: Document) -> Iterator[RenderableType]:
    """All that is printed."""
    numbers = ["ranks", "payload", "optimal", "sent by the busiest", "of optimal", "time", "of optimal"]
    made = terminal.table(["op", "of"], numbers, gap=2)
    for one in document["rows"]:
        made.add_row(
            one["op"],
            one["framework"],
            str(one["ranks"]),
            binary_size(one["bytes"]),
            f"{one['optimal_bytes']:,}",
            f"{max(one['sent_bytes']):,}",
            f"{one['bytes_over_optimal']:.2f}",
            duration(one["seconds"]),
            f"{one['seconds_over_optimal']:.2f}",
        )
    yield made
    yield (
        f"over gloo, each rank in a network namespace of its own, links of {RATE / 1e6:g} Mbit/s; bytes on the "
        "interface, with headers, which the ratio leaves out; time: median, and over that of the optimal bytes"
    )
    yield machine.summary(document["machine"])
