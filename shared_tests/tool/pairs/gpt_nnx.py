"""The same GPT in flax nnx. Its parameters say which of their dims are what; a strategy says where these lie."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardiff
from shared_tests.tool.pairs.sizes import BATCH, HEADS, LAYERS, TOKENS, VOCABULARY, D

RULES = {
    "data_parallel": {"embed": None, "wide": None},
    "fully_sharded": {"embed": "dp", "wide": None},
    "tensor_parallel": {"embed": None, "wide": "tp"},
}


def linear(sizes: tuple[int, int], names: tuple[str | None, str | None], rngs: nnx.Rngs, bias: bool = True) -> Any:
    kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    shift = nnx.with_partitioning(nnx.initializers.zeros_init(), names[1:])
    return nnx.Linear(*sizes, use_bias=bias, kernel_init=kernel, bias_init=shift, rngs=rngs)


def norm(rngs: nnx.Rngs) -> Any:
    gain = nnx.with_partitioning(nnx.initializers.ones_init(), ("embed",))
    shift = nnx.with_partitioning(nnx.initializers.zeros_init(), ("embed",))
    return nnx.LayerNorm(D, scale_init=gain, bias_init=shift, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = norm(rngs), norm(rngs)
        self.q, self.k, self.v = (linear((D, D), ("embed", "wide"), rngs) for _ in range(3))
        self.o = linear((D, D), ("wide", "embed"), rngs)
        self.up, self.down = (
            linear((D, 4 * D), ("embed", "wide"), rngs),
            linear((4 * D, D), ("wide", "embed"), rngs),
        )

    def __call__(self, x: Any) -> Any:
        normed = self.norm1(x)
        q, k, v = (product(normed).reshape(*x.shape[:2], HEADS, -1) for product in (self.q, self.k, self.v))
        x = x + self.o(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x)), approximate=False))


class GPT(nnx.Module):
    """stream: how the residual stream is split, where that is stated."""

    def __init__(self, rngs: nnx.Rngs, stream: Any = None) -> None:
        self.stream = stream
        table = nnx.with_partitioning(nnx.initializers.normal(), (None, "embed"))
        self.tokens = nnx.Embed(VOCABULARY, D, embedding_init=table, rngs=rngs)
        self.places = nnx.Embed(TOKENS, D, embedding_init=table, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = norm(rngs)
        self.head = linear((D, VOCABULARY), ("embed", None), rngs, bias=False)

    def __call__(self, ids: Any) -> Any:
        x = self.stated(self.tokens(ids) + self.places(jnp.arange(TOKENS)))
        for block in self.blocks:
            x = self.stated(block(x))
        return self.stated(self.head(self.norm(x)))

    def stated(self, x: Any) -> Any:
        return x if self.stream is None else jax.lax.with_sharding_constraint(x, self.stream)


def step(mesh: Any, strategy: str) -> tuple[Any, tuple[Any, ...]]:
    """A training step and its arguments, for a mesh of one axis.

    Where parameters are split on dp, it is stated that activations are not split as they are, but by samples.
    """
    stream = NamedSharding(mesh, P("dp")) if strategy == "fully_sharded" else None

    def make() -> tuple[Any, Any]:
        model = GPT(nnx.Rngs(0), stream)
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    model, optimizer = shardiff.abstract(make, mesh, rules=RULES[strategy])
    batch = NamedSharding(mesh, P("dp" if "dp" in mesh.axis_names else None))
    ids = jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32, sharding=batch)

    @nnx.jit(donate_argnums=(0, 1))
    def train(model: Any, optimizer: Any, ids: Any, targets: Any) -> Any:
        def loss(model: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model(ids), targets).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return train, (model, optimizer, ids, ids)
