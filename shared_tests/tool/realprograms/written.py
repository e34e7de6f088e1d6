"""Collectives that are written inside shard_map: experts with all_to_all, a pipeline with ppermute, a ring of keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, TOKENS, MICROBATCHES = 64, 256, 4


def shape(mesh: Any, spec: P, *sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, spec))


def experts(mesh: Any) -> Any:
    """Every rank has an expert; tokens go to it and come back, in both directions of training."""

    def forward(weights: Any, x: Any) -> Any:
        parts = x.reshape(mesh.size, -1, WIDTH)
        sent = jax.lax.all_to_all(parts, "ep", 0, 0)
        done = jax.nn.gelu(sent.reshape(-1, WIDTH) @ weights[0]).reshape(parts.shape)
        return jax.lax.all_to_all(done, "ep", 0, 0).reshape(x.shape)

    layer = jax.shard_map(forward, mesh=mesh, in_specs=(P("ep"), P("ep")), out_specs=P("ep"))
    step = jax.value_and_grad(lambda weights, x: jnp.mean(layer(weights, x) ** 2))
    return step, (shape(mesh, P("ep"), mesh.size, WIDTH, WIDTH), shape(mesh, P("ep"), TOKENS, WIDTH))


def pipeline(mesh: Any) -> Any:
    """A stage on every rank; microbatches wander in a loop, and their gradients back."""
    hops = [(i, i + 1) for i in range(mesh.size - 1)]

    def forward(weights: Any, x: Any) -> Any:
        stage = jax.lax.axis_index("pp")

        def tick(carry: Any, number: Any) -> Any:
            here = jnp.where(stage == 0, x[jnp.minimum(number, MICROBATCHES - 1)], carry)
            done = jnp.tanh(here @ weights[0])
            return jax.lax.ppermute(done, "pp", hops), done

        start = jax.lax.pcast(jnp.zeros_like(x[0]), "pp", to="varying")
        _, done = jax.lax.scan(tick, start, jnp.arange(MICROBATCHES + mesh.size - 1))
        last = jnp.where(stage == mesh.size - 1, done[mesh.size - 1 :], 0)
        return jax.lax.psum(jnp.mean(last**2), "pp")

    loss = jax.shard_map(forward, mesh=mesh, in_specs=(P("pp"), P()), out_specs=P())
    arrays = shape(mesh, P("pp"), mesh.size, WIDTH, WIDTH), shape(mesh, P(), MICROBATCHES, 8, WIDTH)
    return jax.value_and_grad(loss), arrays


def ring_attention(mesh: Any) -> Any:
    """Keys and values wander around the ring while the queries stay: context parallelism."""
    hops = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]

    def forward(q: Any, k: Any, v: Any) -> Any:
        def turn(_: Any, carry: Any) -> Any:
            k, v, top, bottom = carry
            weights = jnp.exp(q @ k.T / WIDTH**0.5)
            top, bottom = top + weights @ v, bottom + weights.sum(axis=1, keepdims=True)
            return *(jax.lax.ppermute(part, "cp", hops) for part in (k, v)), top, bottom

        zeros = jnp.zeros_like(q), jnp.zeros_like(q[:, :1])
        *_, top, bottom = jax.lax.fori_loop(0, mesh.size, turn, (k, v, *zeros))
        return top / bottom

    ring = jax.shard_map(forward, mesh=mesh, in_specs=P("cp"), out_specs=P("cp"))
    step = jax.value_and_grad(lambda q, k, v: jnp.mean(ring(q, k, v) ** 2), argnums=(0, 1, 2))
    return step, (shape(mesh, P("cp"), TOKENS, WIDTH),) * 3
