"""Attention over a split sequence is exact where scores are large, where there are many parts, and in bfloat16."""

from __future__ import annotations

import numpy as np
import pytest

from contract.problem import Batch
from jax_impl.shard_map import ring_attention as ring_in_jax
from shared_tests import attention
from shared_tests.attention import NAMES, errors

WAYS = {  # a strategy, and whether it may use torch's fused kernel
    "context_parallel": ("context_parallel", True),
    "ring_attention": ("ring_attention", True),
    "ring_attention by products": ("ring_attention", False),
    "ulysses": ("ulysses", True),
}
RANKS = 8  # so a ring puts the softmax together from 16 pieces
LARGEST = 500  # of the scores of the second sample: exp overflows above 88 in float32, and above 709 in float64
INPUTS = attention.inputs(samples=2, tokens=64, heads=8, size=4, largest=LARGEST)


@pytest.fixture(scope="module")
def want():
    return attention.exact(INPUTS)


@pytest.fixture(scope="module")
def in_torch(pool):
    """(name of the way, dtype) -> output and gradients, put together from all ranks."""
    names = [(name, dtype) for name in WAYS for dtype in ("float64", "bfloat16")]
    tried = [(*WAYS[name], dtype) for name, dtype in names]
    ranks, results = pool.call(attention.on_ranks, INPUTS, tried, world_size=RANKS), {}
    for one, *of_one in zip(names, *ranks, strict=True):
        whole = [np.full_like(a, np.nan) for a in INPUTS]
        for arrays, positions in of_one:
            for full, mine in zip(whole, arrays, strict=True):
                full[:, positions] = mine
        results[one] = whole
    return results


@pytest.mark.parametrize("way", WAYS)
def test_a_split_softmax_is_exact_though_scores_reach_hundreds(way, in_torch, want):
    assert errors(in_torch[way, "float64"], want).max() < 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_in_bfloat16_many_parts_are_at_most_twice_as_far_off_as_one_device(way, in_torch, want):
    own = errors(attention.on_one_device(INPUTS, "bfloat16"), want)
    found = errors(in_torch[way, "bfloat16"], want)
    assert own.min() > 1e-4  # bfloat16 rounds
    assert (found <= 2 * own).all(), dict(zip(NAMES, (found / own).tolist(), strict=True))


def in_order(arrays, n):
    """Arrays [B, S, H, K] with their pieces where the ranks of a ring in JAX have them."""
    return [ring_in_jax.arranged(Batch(a, a, a), n).x for a in arrays]


@pytest.mark.parametrize(("dtype", "n"), [("float64", 2), ("bfloat16", 4)])
def test_the_ring_in_shard_map_is_as_exact(dtype, n, want):
    found = errors(attention.in_shard_map("ring_attention", in_order(INPUTS, n), dtype, n), in_order(want, n))
    if dtype == "float64":
        assert found.max() < 1e-12
    else:
        own = errors(attention.on_one_device(INPUTS, dtype), want)
        assert (found <= 2 * own).all(), dict(zip(NAMES, (found / own).tolist(), strict=True))
