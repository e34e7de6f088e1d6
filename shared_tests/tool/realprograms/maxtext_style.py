"""Layers as MaxText writes them: parameters with logical axes, activations constrained by logical axes, and rules that
map both to the mesh; the blocks are one layer that is scanned and rematerialized, and a product looks tokens up."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen
from flax.linen.spmd import with_logical_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardiff
from shared_tests.tool.realprograms.flax_linen import train_step

VOCABULARY, WIDTH, HIDDEN, HEADS, LAYERS, BATCH, TOKENS = 256, 64, 128, 4, 2, 16, 32
RULES = (
    ("activation_batch", "dp"),
    ("activation_heads", "tp"),
    ("activation_mlp", "tp"),
    ("activation_embed", None),
    ("activation_length", None),
    ("vocab", "tp"),
    ("heads", "tp"),
    ("mlp", "tp"),
    ("embed", "dp"),  # fully sharded
    ("kv", None),
    ("layers", None),
)
ACTIVATION = ("activation_batch", "activation_length", "activation_embed")


def kernel(module: linen.Module, name: str, axes: tuple[str, ...], *sizes: int) -> Any:
    init = linen.with_logical_partitioning(linen.initializers.normal(0.02), axes)
    return module.param(name, init, sizes)


class Block(linen.Module):
    """Attention, then a gated product, each behind a norm and beside a residual."""

    mesh: Any

    @linen.compact
    def __call__(self, x: Any, _: Any) -> Any:
        constrain = partial(with_logical_constraint, rules=RULES, mesh=self.mesh)
        x = constrain(x, ACTIVATION)
        h, size = linen.RMSNorm()(x), WIDTH // HEADS
        heads = ("activation_batch", "activation_length", "activation_heads", None)
        q, k, v = (
            constrain(
                jnp.einsum("bld,dhk->blhk", h, kernel(self, n, ("embed", "heads", "kv"), WIDTH, HEADS, size)), heads
            )
            for n in ("query", "key", "value")
        )
        weights = jax.nn.softmax(jnp.einsum("blhk,bmhk->bhlm", q, k) / size**0.5)
        mixed = constrain(jnp.einsum("bhlm,bmhk->blhk", weights, v), heads)
        out = kernel(self, "out", ("heads", "kv", "embed"), HEADS, size, WIDTH)
        x = constrain(x + jnp.einsum("blhk,hkd->bld", mixed, out), ACTIVATION)
        h = linen.RMSNorm()(x)
        gate, up = (h @ kernel(self, n, ("embed", "mlp"), WIDTH, HIDDEN) for n in ("wi_0", "wi_1"))
        wide = constrain(jax.nn.silu(gate) * up, ("activation_batch", "activation_length", "activation_mlp"))
        return constrain(x + wide @ kernel(self, "wo", ("mlp", "embed"), HIDDEN, WIDTH), ACTIVATION), None


class Decoder(linen.Module):
    mesh: Any

    @linen.compact
    def __call__(self, tokens: Any) -> Any:
        table = kernel(self, "embedding", ("vocab", "embed"), VOCABULARY, WIDTH)
        x = with_logical_constraint(jax.nn.one_hot(tokens, VOCABULARY) @ table, ACTIVATION, RULES, self.mesh)
        layers = linen.scan(
            linen.remat(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={linen.PARTITION_NAME: "layers"},
        )
        x, _ = layers(self.mesh, name="layers")(x, None)
        return linen.RMSNorm()(x) @ table.T


def decoder(mesh: Any) -> Any:
    model, optimizer = Decoder(mesh), optax.adamw(1e-3)
    tokens = jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32, sharding=NamedSharding(mesh, P("dp")))

    def make() -> Any:
        params = model.init(jax.random.key(0), jnp.zeros((BATCH, TOKENS), jnp.int32))
        return params, optimizer.init(params)

    params, state = shardiff.abstract(make, mesh, rules=dict(RULES))
    return train_step(model, optimizer), (params, state, tokens)
