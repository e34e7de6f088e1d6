"""Equinox with optax: a multilayer perceptron whose weights are split by a rule on their paths, in whole steps."""

from __future__ import annotations

from typing import Any

import equinox as eqx  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardiff

WIDTH, HIDDEN, DEPTH = 64, 256, 3


def train_step(mesh: Any, spec: Any, out_shardings: bool = True) -> tuple[Any, tuple[Any, ...]]:
    """spec: of a path and an array, as shardiff.abstract takes it."""
    optimizer = optax.adamw(1e-3)
    model = eqx.filter_eval_shape(eqx.nn.MLP, WIDTH, WIDTH, HIDDEN, DEPTH, key=jax.random.key(0))
    params, static = eqx.partition(shardiff.abstract(model, mesh, spec), lambda leaf: hasattr(leaf, "shape"))
    state = shardiff.abstract(jax.eval_shape(optimizer.init, params), mesh, spec)
    batch = NamedSharding(mesh, P("dp" if "dp" in mesh.axis_names else None))
    x = jax.ShapeDtypeStruct((32, WIDTH), jnp.float32, sharding=batch)

    def step(params: Any, state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - x) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, value

    kept = jax.tree.map(lambda leaf: leaf.sharding, (params, state)) if out_shardings else (None, None)
    return jax.jit(step, out_shardings=(*kept, NamedSharding(mesh, P()))), (params, state, x)


def data_parallel(mesh: Any) -> Any:
    return train_step(mesh, lambda path, leaf: P())


def fully_sharded(mesh: Any) -> Any:
    return train_step(mesh, lambda path, leaf: P("dp") if leaf.ndim else P())


def tensor_parallel(mesh: Any) -> Any:
    """Columns of even layers, rows of odd ones: an equinox Linear holds (outputs, inputs)."""

    def spec(path: str, leaf: Any) -> P:
        rows = "layers[0]" in path or "layers[2]" in path
        return (P("tp", None) if rows else P(None, "tp")) if leaf.ndim == 2 else P("tp") if rows and leaf.ndim else P()

    return train_step(mesh, spec)


def optimizer_sharded(mesh: Any) -> Any:
    """Adam's moments split over the data-parallel ranks, the parameters whole on each: ZeRO's first stage."""
    return train_step(mesh, lambda path, leaf: P("dp") if leaf.ndim and (".mu" in path or ".nu" in path) else P())
