"""The layers of a transformer block, and where a strategy may communicate in them, inside shard_map.

A strategy that cuts inside a block states what happens at these places, and omits those where nothing does:

    enter(x)                  the normalized input of a layer, before its first product
    leave(y)                  the output of its last product, before it is added to the residual stream
    attend(q, k, v, local)    causal attention of [B, S, H, K], over what this rank has of the sequence or of the heads;
                              local: `causal`, of what is on one rank
    dispatch(h)               what the experts are given, [E, B C, D]: of this rank's tokens, to this rank's experts
    combine(h)                the way back

Between them, a layer computes with the shards that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from contract.transformer import EPSILON, Attention, Experts, Mlp, Transformer
from jax_impl.model import gelu

Local = Callable[..., Array]  # (q[B, S, H, K], k, v[B, T, H, K], position of the first query) -> [B, S, H, K]


@dataclass(frozen=True)
class Blocks:
    """The model for some strategies: a function of (layers, x[B, S, D]), as `jax_impl.model.forward` is.

    recompute: as in `contract.strategy.Run`.
    """

    problem: Transformer
    strategies: tuple[Any, ...]
    recompute: str = "none"

    def __call__(self, params: Iterable[Any], x: Array) -> Array:
        for layer in params:
            h = self.at("enter", norm(x, layer.gain))
            x = x + self.at("leave", LAYERS[type(layer)](self, layer, h))
        return x

    def at(self, place: str, value: Array) -> Array:
        """What the strategies make of `value` there, the innermost last."""
        for strategy in self.strategies:
            if hasattr(strategy, place):
                value = getattr(strategy, place)(value)
        return value


def norm(x: Array, gain: Array) -> Array:
    """RMSNorm over the features, in float32 at least: x / sqrt(mean(x^2) + epsilon) * gain."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + EPSILON)).astype(x.dtype) * gain


def attention(model: Blocks, layer: Attention, h: Array) -> Array:
    """softmax(Q K^T / sqrt(K), causal) V O, over the heads whose columns the layer has."""
    size = model.problem.width // model.problem.heads
    q, k, v = ((h @ w).reshape(*h.shape[:-1], -1, size) for w in (layer.q, layer.k, layer.v))  # [B, S, H, K]
    local = jax.checkpoint(causal) if model.recompute == "selective" else causal
    attends = next((s.attend for s in model.strategies if hasattr(s, "attend")), None)
    out = local(q, k, v) if attends is None else attends(q, k, v, local)
    return out.reshape(*out.shape[:-2], -1) @ layer.o  # Y[B, S, D]


def causal(q: Array, k: Array, v: Array, first: Array | int = 0) -> Array:
    """Attention of q[B, S, H, K] to k, v[B, T, H, K]; row i of q has the position first + i. Softmax in float32."""
    scores = jnp.einsum("bshk,bthk->bhst", q, k) * q.shape[-1] ** -0.5
    seen = first + jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
    wide = scores.astype(jnp.promote_types(q.dtype, jnp.float32))
    p = jax.nn.softmax(jnp.where(seen, wide, -jnp.inf), -1).astype(q.dtype)
    return jnp.einsum("bhst,bthk->bshk", p, v)


def mlp(model: Blocks, layer: Mlp, h: Array) -> Array:
    """gelu(H[B, S, D] @ up[D, F]) @ down[F, D]."""
    return gelu(h @ layer.up) @ layer.down


def experts(model: Blocks, layer: Experts, h: Array) -> Array:
    """The gated sum of the outputs of every token's top-k experts."""
    slots, gates = route(h @ layer.router, model.problem)
    given = jnp.einsum("bskec,bsd->ebcd", slots, h)
    shape = given.shape
    given = model.at("dispatch", given.reshape(shape[0], -1, shape[-1]))  # [E, B C, D]
    out = gelu(given @ layer.up) @ layer.down
    out = model.at("combine", out).reshape(shape)
    return jnp.einsum("bskec,ebcd->bsd", slots * gates[..., None, None], out)


def route(logits: Array, problem: Transformer) -> tuple[Array, Array]:
    """The slot of every token at each of its experts, [B, S, k, E, C] of 0 and 1, and the gates [B, S, k].

    First choices are served before second ones, and tokens in their order. Who finds an expert full gets no slot.
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    top, best = lax.top_k(jax.nn.softmax(wide, -1), problem.top_k)
    chosen = jax.nn.one_hot(best, problem.experts, dtype=jnp.int32)  # [B, S, k, E]
    first = jnp.swapaxes(chosen, 1, 2)
    queue = first.reshape(len(first), -1, problem.experts)  # [B, k S, E]
    ahead = jnp.swapaxes((jnp.cumsum(queue, 1) - queue).reshape(first.shape), 1, 2)
    slots = chosen[..., None] * (ahead[..., None] == jnp.arange(problem.capacity))
    return slots.astype(logits.dtype), (top / jnp.sum(top, -1, keepdims=True)).astype(logits.dtype)


LAYERS: dict[type, Callable[..., Array]] = {Attention: attention, Mlp: mlp, Experts: experts}
