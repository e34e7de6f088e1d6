"""Flax Linen with boxes and logical axis names, and a vocabulary that is split: embedding, loss and their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardiff

VOCABULARY, WIDTH, HIDDEN, TOKENS = 512, 64, 256, 32
RULES = {"vocab": "tp", "embed": None, "mlp": "tp"}


class Model(linen.Module):
    @linen.compact
    def __call__(self, tokens: Any) -> Any:
        init = linen.initializers.lecun_normal()
        boxed: Any = linen.with_logical_partitioning  # unboxed again by param
        table = self.param("table", boxed(init, ("vocab", "embed")), (VOCABULARY, WIDTH))
        x = jnp.take(table, tokens, axis=0)
        x = x + linen.Dense(HIDDEN, kernel_init=boxed(init, ("embed", "mlp")), use_bias=False)(x) @ self.param(
            "down", boxed(init, ("mlp", "embed")), (HIDDEN, WIDTH)
        )
        return linen.RMSNorm()(x) @ table.T


def language_model(mesh: Any) -> Any:
    model, optimizer = Model(), optax.adamw(1e-3)
    batch = NamedSharding(mesh, P("dp" if "dp" in mesh.axis_names else None))
    tokens = jax.ShapeDtypeStruct((16, TOKENS), jnp.int32, sharding=batch)

    def make() -> Any:
        params = model.init(jax.random.key(0), jnp.zeros((1, TOKENS), jnp.int32))
        return params, optimizer.init(params)

    params, state = shardiff.abstract(make, mesh, rules=RULES)
    return train_step(model, optimizer), (params, state, tokens)


def train_step(model: Any, optimizer: Any) -> Any:
    """The step (params, state, tokens) -> (params, state, loss) that learns to predict the next token."""

    def step(params: Any, state: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = model.apply(params, tokens)[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))
