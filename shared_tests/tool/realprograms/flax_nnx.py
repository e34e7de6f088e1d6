"""Flax NNX with optax: whole training steps of a small transformer, sharded by what its parameters' metadata say."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardiff

WIDTH, HIDDEN, HEADS, LAYERS, TOKENS = 64, 256, 8, 2, 32
TENSOR_PARALLEL = {"embed": None, "heads": "tp", "mlp": "tp"}
FULLY_SHARDED = {"embed": "dp", "heads": None, "mlp": None}
REPLICATED = dict.fromkeys(TENSOR_PARALLEL)
BOTH = {"embed": "dp", "heads": "tp", "mlp": "tp"}


def linear(rows: str, columns: str, sizes: tuple[int, int], rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (rows, columns))
    return nnx.Linear(*sizes, use_bias=False, kernel_init=init, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.List([linear("embed", "heads", (WIDTH, WIDTH), rngs) for _ in range(3)])
        self.out = linear("heads", "embed", (WIDTH, WIDTH), rngs)
        self.up = linear("embed", "mlp", (WIDTH, HIDDEN), rngs)
        self.down = linear("mlp", "embed", (HIDDEN, WIDTH), rngs)

    def __call__(self, x: Any) -> Any:
        batch, tokens, width = x.shape
        normed = self.norms[0](x)
        q, k, v = (layer(normed).reshape(batch, tokens, HEADS, -1) for layer in self.qkv)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, tokens, width)
        x = x + self.out(mixed)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Scanned(nnx.Module):
    """As maxtext has it: the layers' parameters stacked, one loop over them, and recomputed in the backward pass."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def make(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.blocks = make(rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata={nnx.PARTITION_NAME: "layers"})
        @nnx.remat
        def layer(block: Block, x: Any) -> Any:
            return block(x)

        return layer(self.blocks, x)


def train_step(mesh: Any, kind: type, rules: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    def make() -> tuple[Any, Any]:
        model = kind(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    model, optimizer = shardiff.abstract(make, mesh, rules={**rules, "layers": None})
    batch = NamedSharding(mesh, P("dp" if "dp" in mesh.axis_names else None))
    x = jax.ShapeDtypeStruct((16, TOKENS, WIDTH), jnp.float32, sharding=batch)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        def loss(model: Any) -> Any:
            return jnp.mean((model(x) - x) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return step, (model, optimizer, x)


def data_parallel(mesh: Any) -> Any:
    return train_step(mesh, Model, REPLICATED)


def fully_sharded(mesh: Any) -> Any:
    return train_step(mesh, Model, FULLY_SHARDED)


def tensor_parallel(mesh: Any) -> Any:
    return train_step(mesh, Model, TENSOR_PARALLEL)


def both(mesh: Any) -> Any:
    return train_step(mesh, Model, BOTH)


def scanned(mesh: Any) -> Any:
    return train_step(mesh, Scanned, BOTH)
