"""What each collective computes, in NumPy, from the list of all ranks' arrays. Both frameworks are tested with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Ranks = list  # one array a rank; None where a rank gets nothing


def broadcast(xs: Ranks, root: int) -> Ranks:
    return [xs[root] for _ in xs]


def scatter(xs: Ranks, root: int) -> Ranks:
    return np.split(xs[root], len(xs))


def gather(xs: Ranks, root: int) -> Ranks:
    return [np.concatenate(xs) if rank == root else None for rank in range(len(xs))]


def reduce(xs: Ranks, root: int) -> Ranks:
    return [sum(xs[1:], xs[0]) if rank == root else None for rank in range(len(xs))]


def all_gather(xs: Ranks, dim: int = 0) -> Ranks:
    return [np.concatenate(xs, axis=dim) for _ in xs]


def reduce_scatter(xs: Ranks, dim: int = 0) -> Ranks:
    return np.split(sum(xs[1:], xs[0]), len(xs), axis=dim)


def all_reduce(xs: Ranks) -> Ranks:
    return [sum(xs[1:], xs[0]) for _ in xs]


def all_to_all(xs: Ranks) -> Ranks:
    blocks = [np.split(x, len(xs)) for x in xs]  # blocks[source][target]
    return [np.concatenate(column) for column in zip(*blocks, strict=True)]


def all_to_all_dims(xs: Ranks, split: int, concat: int) -> Ranks:
    blocks = [np.split(x, len(xs), axis=split) for x in xs]
    return [np.concatenate(column, axis=concat) for column in zip(*blocks, strict=True)]


def permute(xs: Ranks, edges: list[tuple[int, int]]) -> Ranks:
    source = {target: source for source, target in edges}
    return [xs[source[rank]] if rank in source else np.zeros_like(xs[rank]) for rank in range(len(xs))]


DEFINITIONS: dict[str, Callable[..., Ranks]] = {
    f.__name__: f for f in (broadcast, scatter, gather, reduce, all_gather, reduce_scatter, all_reduce, all_to_all)
}
ROOTED = ("broadcast", "scatter", "gather", "reduce")
WITH_DIM = ("all_gather", "reduce_scatter")


def arguments(op: str, size: int) -> list[dict[str, int]]:
    """The keyword arguments with which to test an op on `size` ranks."""
    if op in ROOTED:
        return [{"root": root} for root in sorted({0, size - 1})]
    return [{"dim": dim} for dim in (0, 1)] if op in WITH_DIM else [{}]


def inputs(size: int, dtype: str, seed: int = 0) -> Ranks:
    """An array [8, 4] per rank of small whole numbers, whose sums are exact in every dtype."""
    rng = np.random.default_rng([seed, size])
    return [rng.integers(-8, 9, (8, 4)).astype(dtype) for _ in range(size)]


# The pairs of collectives of which one is the transpose of the other. A replicated array is one array, so where an
# input or output is replicated it counts once in the inner products <f(x), y> = <x, f^T(y)>.
PAIRS: dict[str, tuple[Callable[..., Ranks], Callable[..., Ranks]]] = {  # name -> forward, backward
    "all_gather_reduce_scatter": (all_gather, reduce_scatter),
    "reduce_scatter_all_gather": (reduce_scatter, all_gather),
    "identity_all_reduce": (lambda xs: xs, all_reduce),
    "all_reduce_identity": (all_reduce, lambda ys: ys),
    "all_to_all_back": (all_to_all_dims, lambda ys, split, concat: all_to_all_dims(ys, concat, split)),
}
REPLICATED_INPUT = ("identity_all_reduce",)
REPLICATED_OUTPUT = ("all_reduce_identity",)
