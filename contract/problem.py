"""The problem: an MLP x = gelu(x @ W[l] + b[l]) with the mean squared error, whose numbers are drawn in NumPy.

Parameters are drawn once, as the full model, from a seed that does not depend on the number of ranks, and every
implementation slices the same arrays. A seed set again in each shard, or a scale of 1/sqrt(local width), would make
another model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from shardiff.record import BITS

DTYPES = ("float64", "float32", "bfloat16")
BYTES = {dtype: BITS[dtype] // 8 for dtype in DTYPES}


class Layer(NamedTuple):
    """One layer: w[in, out] and b[out], as NumPy arrays, torch tensors or JAX arrays (a pytree to JAX)."""

    w: Any
    b: Any


class Batch(NamedTuple):
    """x[B, D], y[B, D], and weight[B, 1], the factor of a sample's squared errors in the loss.

    weight is 1 / (number of true samples * D), so that sum(weight * (out - y)^2) is the mean over the true samples
    however they are distributed over ranks. A row that only pads a shard to the common size has weight 0.
    """

    x: Any
    y: Any
    weight: Any


@dataclass(frozen=True)
class Problem:
    """Sizes default to the lecture's MLP. dtype: of parameters, activations, gradients and optimizer state."""

    batch: int = 128
    width: int = 1024
    layers: int = 4
    dtype: str = "float32"
    seed: int = 0

    unit: ClassVar[int] = 1  # how many layers of a list of parameters stay together
    sequence = 1  # tokens of a sample

    @property
    def depth(self) -> int:
        """The length of a list of parameters."""
        return self.layers

    def shape(self, layer: int) -> Any:
        """The shapes of one layer's parameters, as a tuple of the layer's type."""
        return _shape(self.width)

    def shapes(self) -> list[Any]:
        """The same for every layer."""
        return [self.shape(layer) for layer in range(self.depth)]

    def flaw(self) -> str | None:
        """Why there is no such problem, in one line; None if there is."""
        return None

    def parameters(self) -> list[Any]:
        """The full model in float64. w ~ N(0, 1/D); biases are not zero, so that a lost one is noticed."""
        rng = np.random.default_rng([self.seed, 0])
        d = self.width
        return [
            Layer(rng.standard_normal((d, d)) / np.sqrt(d), 0.1 * rng.standard_normal(d)) for _ in range(self.layers)
        ]

    def data(self, step: int) -> Batch:
        """The global batch of a training step in float64. Every step has its own."""
        rng = np.random.default_rng([self.seed, 1, step])
        x, y = rng.standard_normal((2, self.batch, self.width))
        return Batch(x, y, np.full((self.batch, 1), 1 / (self.batch * self.width)))


@lru_cache(64)
def _shape(width: int) -> Layer:
    return Layer((width, width), (width,))


def split_sizes(total: int, parts: int) -> list[int]:
    """Sizes of `parts` contiguous shares of `total`, as equal as possible, larger ones first: 10 in 4 = 3, 3, 2, 2."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def split_slices(total: int, parts: int) -> list[slice]:
    """The shares of `split_sizes` as slices."""
    ends = np.cumsum([0, *split_sizes(total, parts)]).tolist()
    return [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def pad_batch(batch: Batch, parts: int) -> Batch:
    """The batch in `parts` shares of one common size, for frameworks that need equal shards.

    [B, ...] -> [parts * ceil(B / parts), ...]: each share of `split_slices` is padded with rows of zeros, whose weight
    is 0, so that loss and gradients do not change. If `parts` divides B, the batch is returned as it is.
    """
    rows = len(batch.x)
    if rows % parts == 0:
        return batch
    size = -(-rows // parts)

    def pad(a: np.ndarray) -> np.ndarray:
        shares = [a[s] for s in split_slices(rows, parts)]
        return np.concatenate([np.pad(s, ((0, size - len(s)), *[(0, 0)] * (a.ndim - 1))) for s in shares])

    return Batch(*map(pad, batch))


def split_microbatches(batch: Batch, shares: int, microbatches: int) -> Batch:
    """The batch in microbatches of one size, each of `shares` equal shares: [B, ...] -> [m, shares * b, ...].

    Each share of `split_slices` is split into microbatches of its own, as the ranks of data_parallel split theirs.
    Smaller microbatches are padded with rows of zeros, whose weight is 0.
    """
    rows = len(batch.x)
    size = -(-(-(-rows // shares)) // microbatches)

    def arranged(a: np.ndarray) -> np.ndarray:
        out = np.zeros((microbatches, shares, size, *a.shape[1:]), a.dtype)
        for s, share in enumerate(split_slices(rows, shares)):
            for m, one in enumerate(split_slices(share.stop - share.start, microbatches)):
                out[m, s, : one.stop - one.start] = a[share][one]
        return out.reshape(microbatches, shares * size, *a.shape[1:])

    return Batch(*map(arranged, batch))
