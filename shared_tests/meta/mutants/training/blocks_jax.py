"""Mistakes in blocks of a transformer and in the strategies that cut inside them, in JAX."""

from __future__ import annotations

from typing import Any

from shared_tests.meta.mutants.training.mutant import (
    ALL,
    MOE,
    RAISES,
    Mutant,
    of_blocks,
)


def in_jax(module: str, name: str, old: str, new: str, claims: Any, **rest: Any) -> Mutant:
    return of_blocks(f"jax_impl.{module}", name, old, new, claims, **rest)


BLOCKS_JAX = (
    in_jax(
        "blocks",
        "a causal mask that lets a token see the next one, in JAX",
        "first + jnp.arange(q.shape[1])[:, None] >=",
        "first + 1 + jnp.arange(q.shape[1])[:, None] >=",
        ALL,
        strategy="single_device",
        degree=1,
    ),
    in_jax(
        "blocks",
        "epsilon outside of the norm's root, in JAX",
        "lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + EPSILON)",
        "(1 / (jnp.sqrt(jnp.mean(jnp.square(wide), -1, keepdims=True)) + EPSILON))",
        ALL,
        strategy="single_device",
        degree=1,
    ),
    in_jax(
        "blocks",
        "gates not normalized, in JAX",
        "(top / jnp.sum(top, -1, keepdims=True))",
        "top",
        ALL,
        strategy="expert_parallel",
        problem=MOE,
        of_both="annotated",
    ),
    in_jax(
        "blocks",
        "the residual added before the sum over the ranks, in shard_map",
        'x = x + self.at("leave", LAYERS[type(layer)](self, layer, h))',
        'x = self.at("leave", x + LAYERS[type(layer)](self, layer, h))',
        ALL,
        strategy="megatron_tensor_parallel",
    ),
    in_jax(
        "shard_map.megatron_tensor_parallel",
        "no sum where a layer is left, in shard_map",
        "return all_reduce(y, AXIS)",
        "return y",
        {RAISES},
        words="pcast",
    ),
    in_jax(
        "shard_map.sequence_parallel",
        "parts of the sequence gathered from the last to the first",
        "return all_gather(x, AXIS, dim=1)",
        "return all_gather(x, AXIS, dim=1)[:, ::-1]",
        ALL,
    ),
    in_jax(
        "shard_map.context_parallel",
        "a mask off by one shard, in shard_map",
        "lax.axis_index(AXIS) * q.shape[1])",
        "(lax.axis_index(AXIS) + 1) * q.shape[1])",
        ALL,
    ),
    in_jax(
        "shard_map.ring_attention",
        "the late pieces in the order of the ranks, in shard_map",
        "for i in (rank, 2 * n - 1 - rank)]",
        "for i in (rank, n + rank)]",
        ALL,
    ),
    in_jax(
        "shard_map.ring_attention",
        "the ring goes the wrong way, in shard_map",
        "[(source, (source + 1) % n) for source in range(n)]",
        "[(source, (source - 1) % n) for source in range(n)]",
        ALL,
        degree=4,
    ),
    in_jax(
        "shard_map.ring_attention",
        "earlier and later ranks confused, in shard_map",
        "earlier = (rank - turn) % n < rank",
        "earlier = (rank - turn) % n > rank",
        ALL,
    ),
    in_jax(
        "online_softmax",
        "logarithms of sums added, in shard_map",
        "jnp.logaddexp(one[1], other[1])",
        "one[1] + other[1]",
        ALL,
        strategy="ring_attention",
    ),
    in_jax(
        "shard_map.ulysses",
        "split and concat swapped on the way back, in shard_map",
        "AXIS, split=1, concat=2)",
        "AXIS, split=2, concat=1)",
        {RAISES},
    ),
    in_jax(
        "shard_map.expert_parallel",
        "tokens sent to the next rank's experts, in shard_map",
        "return all_to_all_dims(h, AXIS, split=0, concat=1)",
        "return all_to_all_dims(h[::-1], AXIS, split=0, concat=1)",
        ALL,
        problem=MOE,
    ),
    in_jax(
        "transformer",
        "queries and values confused",
        "in (self.q[...], self.k[...], self.v[...])",
        "in (self.v[...], self.k[...], self.q[...])",
        ALL,
        strategy="sequence_parallel",
        of_both="annotated",
    ),
    in_jax(
        "transformer",
        "experts' outputs combined without the gates, annotated",
        "slots * gates[..., None, None], out)",
        "slots, out)",
        ALL,
        strategy="expert_parallel",
        problem=MOE,
        of_both="annotated",
    ),
    in_jax(
        "annotated.expert_parallel",
        "the experts' split not stated",
        '    "expert": AXIS,  # a rank\'s experts: up[E_ep, D, F], down[E_ep, F, D]\n',
        "",
        {RAISES},
        words="where the layout says",
        problem=MOE,
    ),
)
