"""The transformer in flax.nnx with logical axis names on its parameters, for what is derived from annotations.

It is written as for one device. An activation's dims have names too, and `constrain` states how they are split:
"batch"; "product_sequence", and in the residual stream "sequence" beyond that; "attend_sequence" in attention;
"heads", and "attend_heads" in attention; "up_out"; and for what experts are given "experts" and "batch_of_experts".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from contract.transformer import Attention as AttentionLayer
from contract.transformer import Experts as ExpertsLayer
from contract.transformer import Mlp as MlpLayer
from contract.transformer import Transformer
from jax_impl.blocks import causal, norm, route
from jax_impl.model import STREAM, Constrain, as_it_is, gelu, product

NAMES: dict[type, Any] = {
    AttentionLayer: AttentionLayer(
        ("gain",), ("qkv_in", "qkv_out"), ("qkv_in", "qkv_out"), ("qkv_in", "qkv_out"), ("o_in", "o_out")
    ),
    MlpLayer: MlpLayer(("gain",), ("up_in", "up_out"), ("down_in", "down_out")),
    ExpertsLayer: ExpertsLayer(
        ("gain",),
        ("router_in", "router_out"),
        ("expert", "expert_up_in", "expert_up_out"),
        ("expert", "expert_down_in", "expert_down_out"),
    ),
}


class Sublayer(nnx.Module):
    """The parameters of one layer, under their names, with a leading dim of stages in a pipeline."""

    gain: Any
    of_normalized: Callable[[Array, Constrain], Array]  # of the normalized input: what is added to the stream

    def __init__(self, layer: Any, problem: Transformer, recompute: str = "none", fused: bool = False):
        self.problem, self.recompute, self.fused = problem, recompute, fused
        for name, value, axes in zip(layer._fields, layer, NAMES[type(layer)], strict=True):
            stage = ("stage",) if value.ndim > len(axes) else ()
            setattr(self, name, nnx.Param(value, out_sharding=(*stage, *axes), eager_sharding=False))

    def __call__(self, x: Array, constrain: Constrain) -> Array:
        """The residual stream [batch, sequence, D] after this layer."""
        out = gathered_gradient(self.of_normalized(norm(x, self.gain[...]), constrain), constrain)
        return constrain(x + constrain(out, *STREAM), *STREAM)


def gathered_gradient(y: Array, constrain: Constrain) -> Array:
    """y[batch, sequence, D], whose gradient is stated to be split as products are, and not as the residual stream.

    Both products of the backward pass need it so. Unless that is said, a compiler may gather the other factor of the
    weight's gradient instead, and compute and sum all of that gradient on every rank.
    """

    @jax.custom_vjp
    def same(y: Array) -> Array:
        return y

    same.defvjp(lambda y: (y, None), lambda _, g: (constrain(g, "batch", "product_sequence"),))
    return same(y)


class Attention(Sublayer):
    q: Any
    k: Any
    v: Any
    o: Any

    def of_normalized(self, h: Array, constrain: Constrain) -> Array:
        """q, k and v are one product or three, as the strategies want it."""
        weights = [w.reshape(len(w), self.problem.heads, -1) for w in (self.q[...], self.k[...], self.v[...])]
        if self.fused:
            names = ("qkv_in", None, "qkv_out")
            qkv: Any = jnp.moveaxis(product(h, jnp.stack(weights, 1), constrain, names), 2, 0)
        else:
            qkv = [product(h, w, constrain, ("qkv_in", "qkv_out")) for w in weights]
        qkv = (constrain(a, "batch", "product_sequence", "heads") for a in qkv)
        q, k, v = (constrain(a, "batch", "attend_sequence", "attend_heads") for a in qkv)
        local = jax.checkpoint(causal) if self.recompute == "selective" else causal
        out = constrain(local(q, k, v), "batch", "attend_sequence", "attend_heads")
        out = constrain(out, "batch", "product_sequence", "heads")
        return product(out.reshape(*out.shape[:2], -1), self.o[...], constrain, ("o_in", "o_out"))


class Mlp(Sublayer):
    up: Any
    down: Any

    def of_normalized(self, h: Array, constrain: Constrain) -> Array:
        z = product(h, self.up[...], constrain, ("up_in", "up_out"))
        hidden = gelu(constrain(z, "batch", "product_sequence", "up_out"))
        hidden = constrain(hidden, "batch", "product_sequence", "up_out")
        return product(hidden, self.down[...], constrain, ("down_in", "down_out"))


class Experts(Sublayer):
    router: Any
    up: Any
    down: Any

    def of_normalized(self, h: Array, constrain: Constrain) -> Array:
        """The einsums of GShard (Lepikhin et al., 2006.16668), stated before and after the tokens travel."""
        h = constrain(h, "batch", "product_sequence")
        router = constrain(self.router[...], None, None)  # and so its gradient, of which else any axis has parts
        logits: Any = product(h, router)
        slots, gates = (constrain(a, "batch", "product_sequence") for a in route(logits, self.problem))
        given = constrain(jnp.einsum("bskec,bsd->ebcd", slots, h), None, "batch")
        given = constrain(given, "experts", "batch_of_experts")
        up = constrain(self.up[...], "experts", None, "expert_up_out")
        down = constrain(self.down[...], "experts", "expert_down_in")
        z = jnp.einsum("ebcd,edf->ebcf", given, up)
        hidden = gelu(constrain(z, "experts", "batch_of_experts", None, "expert_up_out"))
        out = jnp.einsum("ebcf,efd->ebcd", hidden, down)
        out = constrain(constrain(out, "experts", "batch_of_experts"), None, "batch")
        out = jnp.einsum("bskec,ebcd->bsd", slots * gates[..., None, None], out)
        return constrain(out, "batch", "product_sequence")


KINDS: dict[type, type[Sublayer]] = {AttentionLayer: Attention, MlpLayer: Mlp, ExpertsLayer: Experts}


class Model(nnx.Module):
    """The blocks on given parameters, because all implementations start from the same.

    recompute: as in `contract.strategy.Run`. fused: whether q, k and v are one product.
    """

    def __init__(self, params: list[Any], problem: Transformer, recompute: str = "none", fused: bool = False):
        self.layers = nnx.List([KINDS[type(layer)](layer, problem, recompute, fused) for layer in params])

    def __call__(self, x: Array, constrain: Constrain = as_it_is) -> Array:
        """constrain: states how an array is split, by the names of its dims."""
        for layer in self.layers:
            x = layer(x, constrain)
        return x
