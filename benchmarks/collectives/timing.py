"""One collective timed on one rank. The same code for both frameworks, which it knows as a `Side` only.

METHOD says what is done; it is printed with the figures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

SPLIT_INPUT = ("all_gather", "gather")  # S is the total output; a rank puts in S/n
SPLIT_OUTPUT = ("reduce_scatter", "scatter")  # S is the total input; a rank gets S/n
IDENTITIES = (
    "all_reduce = reduce_scatter, then all_gather",
    "all_to_all = transpose of ranks and blocks",
    "gather = reduce under concatenation",
)
WARM_UP = 3  # calls
BATCHES, LONG_BATCH = 3, 0.1  # amortized batches, and seconds that one should last
BARE_BATCHES, BARE_BATCH = 80, 0.03  # the same where a bare loop takes turns: many, as a ratio is looked for
ITEMSIZE = 4  # float32

METHOD = (
    "One process per rank in both frameworks, the same transport and the same threads per rank; float32; S is the "
    "payload as nccl-tests counts it. Every size is checked for its values first, then warmed up with 3 calls.",
    "Between two timings the result is checked again, and the input renewed: of every single call, and of the last "
    "call of every batch. In a batch of torch's sums, which are made in place, the summands are zeros, lest they grow.",
    "per_iteration: synchronize the device, barrier, start the clock, one call, synchronize, stop the clock, barrier. "
    "An iteration takes as long as its slowest rank; min, median and p99 are over iterations, rank min, mean and max "
    "over the ranks' own medians.",
    "amortized: 3 batches of calls back to back, a barrier around each batch, one division; the statistics are over "
    "the batches. Batches last 0.1 s or more where the call is short (1000 calls at most). With a bare loop: 80 of "
    "0.03 s, in turn with as many of the bare loop's, every other time in the opposite order.",
    "algbw = S/t of the median; busbw = algbw x factor (nccl-tests, doc/PERFORMANCE.md): all_reduce 2(n-1)/n; "
    "all_gather, reduce_scatter, all_to_all, gather, scatter (n-1)/n; broadcast, reduce, permute 1; one rank 0. "
    "GB = 1e9 bytes. The factor is that of the op asked for, also where another one runs.",
    "t = alpha + S/beta is fitted to the medians of five sizes or more by least absolute relative error; fewer sizes "
    "would say nothing about the error of two parameters. off by: the median of |fit - t|/t over the sizes, and the "
    "largest.",
    "torch calls torch.distributed on buffers that exist; JAX calls a compiled shard_map, which makes its result anew. "
    "SPMD programs have no rooted collectives: runs_as is what the compiled program holds.",
)


@dataclass(frozen=True)
class Side:
    """A collective as a framework offers it to one rank.

    call: start it, with a result to wait for. wait: until that result is there. agree: the maximum of a number over the
    ranks, which is a barrier too. depth: calls that may be under way at once, so that their results fit in memory.
    renew: prepare the buffers for so many calls. right: whether a result, the last of so many calls, has right values.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], None]
    agree: Callable[[float], float]
    depth: int = 1 << 30
    renew: Callable[[int], None] = lambda calls: None
    right: Callable[[Any, int], bool] = lambda result, calls: True


def measure(side: Side, iterations: int, budget: float, bare: bool = False) -> dict[str, Any]:
    """This rank's seconds: {"per_iteration": one for each iteration, "amortized", "bare": one for each batch}.

    iterations: at least so many calls in each mode, fewer where they would take more than `budget` seconds. bare: time
    batches of a loop that does nothing but call and wait, in turn with the amortized ones. "calls": those of a batch.
    "right": whether the values that were checked between the timings of a mode were all right.
    """
    seconds = 1e-7
    for _ in range(WARM_UP):
        began = perf_counter()
        side.wait(side.call())
        ended = perf_counter()
        side.renew(1)
        seconds = max(side.agree(ended - began), 1e-7)
        if seconds * WARM_UP > budget:
            break
    affordable = max(BATCHES, int(budget / seconds))
    count = min(iterations, affordable)
    batches, long = (min(BARE_BATCHES, affordable), BARE_BATCH) if bare else (BATCHES, LONG_BATCH)
    calls = max(-(-count // batches), min(1000, affordable // batches, int(long / seconds)))

    modes = {"amortized": _back_to_back, **({"bare": _bare} if bare else {})}
    todo = [("per_iteration", _bare, 1)] * count
    for batch in range(batches):
        turn = reversed(modes.items()) if batch % 2 else modes.items()
        todo += [(mode, loop, calls) for mode, loop in turn]
    seconds_of: dict[str, list[float]] = {"per_iteration": [], **{mode: [] for mode in modes}}
    right = dict.fromkeys(seconds_of, True)
    for (mode, loop, times), (_, _, after) in zip(todo, [*todo[1:], todo[-1]], strict=True):
        began = perf_counter()
        result = loop(side, times)
        seconds_of[mode].append((perf_counter() - began) / times)
        right[mode] = side.right(result, times) and right[mode]
        del result
        side.renew(after)
        side.agree(0)
    return {**seconds_of, "calls": calls, "right": right}


def _back_to_back(side: Side, calls: int) -> Any:
    """The last call's result."""
    pending: deque[Any] = deque()
    for _ in range(calls - 1):
        pending.append(side.call())
        if len(pending) >= side.depth:
            side.wait(pending.popleft())
    last = side.call()
    for result in (*pending, last):
        side.wait(result)
    return last


def _bare(side: Side, calls: int) -> Any:
    """The last call's result."""
    for _ in range(calls - 1):
        side.wait(side.call())
    last = side.call()
    side.wait(last)
    return last


def whole(payload: int, ranks: int) -> int:
    """The payload rounded down to whole float32 in whole blocks of each rank, in bytes."""
    return payload // (ITEMSIZE * ranks) * ITEMSIZE * ranks


def lengths(op: str, payload: int, ranks: int) -> tuple[int, int]:
    """float32 values that a rank puts in and gets out. payload: S in bytes, whole blocks of each rank."""
    full = payload // ITEMSIZE
    return (full // ranks if op in SPLIT_INPUT else full), (full // ranks if op in SPLIT_OUTPUT else full)


def values(rank: int, start: int, length: int) -> np.ndarray:
    """Elements start .. start+length of what `rank` puts in: integers that tell ranks and places apart, and add up."""
    return 1000 * rank + np.resize(np.roll(np.arange(251, dtype=np.float32), -start), length)


def expected(op: str, rank: int, ranks: int, payload: int) -> np.ndarray | None:
    """What `rank` must get when every rank puts in its `values` and rank 0 is the root; None if it gets nothing."""
    _, length = lengths(op, payload, ranks)
    block = payload // ITEMSIZE // ranks
    if op in ("reduce", "gather") and rank != 0:
        return None
    if op in ("reduce", "all_reduce", "reduce_scatter"):
        start = block * rank if op == "reduce_scatter" else 0
        return ranks * values(0, start, length) + 1000 * math.comb(ranks, 2)
    if op in ("gather", "all_gather"):
        return np.concatenate([values(other, 0, block) for other in range(ranks)])
    if op == "all_to_all":
        return np.concatenate([values(other, block * rank, block) for other in range(ranks)])
    if op == "scatter":
        return values(0, block * rank, length)
    return values((rank - 1) % ranks if op == "permute" else 0, 0, length)
