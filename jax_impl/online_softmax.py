"""Attention to some of the keys at a time, put together with an online softmax (Milakov and Gimelshein, 1805.02867).

Of every part two things are known: its output, normalized by the part's own sum, and the logarithm of that sum. From
these follow both of the whole. All sums are in float32 at least.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def wide(x: Array) -> Array:
    """In float32 at least."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def attend_to(q: Array, k: Array, v: Array, causal: bool) -> tuple[Array, Array]:
    """The output of a part [B, S, H, K], and the logarithm of its sum [B, S, H], of q[B, S, H, K], k, v[B, T, H, K].

    causal: a query sees the keys up to its own number.
    """
    found = wide(jnp.einsum("bshk,bthk->bsht", q, k)) * q.shape[-1] ** -0.5
    if causal:
        found = jnp.where(jnp.tri(q.shape[1], k.shape[1], dtype=bool)[:, None], found, -jnp.inf)
    total = jax.nn.logsumexp(found, axis=-1)
    return jnp.einsum("bsht,bthk->bshk", jnp.exp(found - total[..., None]), wide(v)), total


def joined(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Two parts as one: each output is weighted with its share of the sum of both."""
    total = jnp.logaddexp(one[1], other[1])
    a, b = (out * jnp.exp(of_part - total)[..., None] for out, of_part in (one, other))
    return a + b, total
