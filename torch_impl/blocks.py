"""The layers of a transformer block, and where a strategy may communicate in them.

A strategy that cuts inside a block states what happens at these places, and omits those where nothing does:

    enter(x, mesh)                  the normalized input of a layer, before its first product
    leave(y, mesh)                  the output of its last product, before it is added to the residual stream
    attend(q, k, v, local, mesh)    causal attention of [B, S, H, K], over what this rank has of the sequence or of the
                                    heads; local: `causal`, of what is on one rank
    dispatch(h, mesh)               what the experts are given, [E, B C, D]: of its tokens, to this rank's experts
    combine(h, mesh)                the way back

Between them, a layer computes with the shards that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from contract.transformer import EPSILON, Attention, Experts, Mlp, Transformer
from torch_impl.mesh import Mesh
from torch_impl.model import gelu

Local = Callable[..., Tensor]  # (q[B, S, H, K], k, v[B, T, H, K], position of the first query) -> [B, S, H, K]


@dataclass(frozen=True)
class Blocks:
    """The model for some strategies: a function of (layers, x[B, S, D], mesh), as `torch_impl.model.forward` is.

    recompute: as in `contract.strategy.Run`.
    """

    problem: Transformer
    strategies: tuple[Any, ...]
    recompute: str = "none"

    def __call__(self, params: Iterable[Any], x: Tensor, mesh: Mesh) -> Tensor:
        for layer in params:
            h = self.at("enter", norm(x, layer.gain), mesh)
            x = x + self.at("leave", LAYERS[type(layer)](self, layer, h, mesh), mesh)
        return x

    def at(self, place: str, value: Tensor, mesh: Mesh) -> Tensor:
        """What the strategies make of `value` there, the innermost last."""
        for strategy in self.strategies:
            if hasattr(strategy, place):
                value = getattr(strategy, place)(value, mesh)
        return value


def again(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function whose arguments alone are kept: the backward pass runs it again (Chen et al., 1604.06174)."""

    def checkpointed(*args: Any) -> Tensor:
        return checkpoint(function, *args, use_reentrant=False)

    return checkpointed


def norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm over the features, in float32 at least: x / sqrt(mean(x^2) + epsilon) * gain."""
    wide = x.float() if x.dtype == torch.bfloat16 else x
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(x.dtype) * gain


def attention(model: Blocks, layer: Attention, h: Tensor, mesh: Mesh) -> Tensor:
    """softmax(Q K^T / sqrt(K), causal) V O, over the heads whose columns the layer has."""
    size = model.problem.width // model.problem.heads
    q, k, v = ((h @ w).unflatten(-1, (-1, size)) for w in (layer.q, layer.k, layer.v))  # [B, S, H, K]
    local = again(causal) if model.recompute == "selective" else causal
    attends = next((s.attend for s in model.strategies if hasattr(s, "attend")), None)
    out = local(q, k, v) if attends is None else attends(q, k, v, local, mesh)
    return out.flatten(-2) @ layer.o  # Y[B, S, D]


def causal(q: Tensor, k: Tensor, v: Tensor, first: int = 0) -> Tensor:
    """Attention of q[B, S, H, K] to k, v[B, T, H, K]; row i of q has the position first + i. Softmax in float32."""
    scores = torch.einsum("bshk,bthk->bhst", q, k) * q.shape[-1] ** -0.5
    hidden = scores.new_full(scores.shape[-2:], -torch.inf).triu(first + 1)  # a sum, unlike masked_fill, keeps nothing
    wide = torch.float32 if q.dtype == torch.bfloat16 else q.dtype
    p = F.softmax(scores + hidden, -1, dtype=wide).to(q.dtype)
    return torch.einsum("bhst,bthk->bshk", p, v)


def mlp(model: Blocks, layer: Mlp, h: Tensor, mesh: Mesh) -> Tensor:
    """gelu(H[B, S, D] @ up[D, F]) @ down[F, D]."""
    return gelu(h @ layer.up) @ layer.down


def experts(model: Blocks, layer: Experts, h: Tensor, mesh: Mesh) -> Tensor:
    """The gated sum of the outputs of every token's top-k experts."""
    problem = model.problem
    slots, gates = route(h @ layer.router, problem)
    rows = len(h)
    given = torch.einsum("bskec,bsd->ebcd", slots, h).flatten(1, 2)  # [E, B C, D]
    given = model.at("dispatch", given, mesh)
    out = torch.bmm(gelu(torch.bmm(given, layer.up)), layer.down)
    out = model.at("combine", out, mesh).unflatten(1, (rows, problem.capacity))
    return torch.einsum("bskec,ebcd->bsd", slots * gates[..., None, None], out)


def route(logits: Tensor, problem: Transformer) -> tuple[Tensor, Tensor]:
    """The slot of every token at each of its experts, [B, S, k, E, C] of 0 and 1, and the gates [B, S, k].

    First choices are served before second ones, and tokens in their order. Who finds an expert full gets no slot.
    """
    wide = torch.float32 if logits.dtype == torch.bfloat16 else logits.dtype
    top, best = logits.softmax(-1, dtype=wide).topk(problem.top_k, dim=-1)
    chosen = F.one_hot(best, problem.experts)
    queue = chosen.transpose(1, 2).flatten(1, 2)  # [B, k S, E]
    ahead = (queue.cumsum(1) - queue).unflatten(1, (problem.top_k, -1)).transpose(1, 2)
    places = torch.arange(problem.capacity, device=logits.device)
    slots = chosen[..., None] * (ahead[..., None] == places)
    return slots.to(logits.dtype), (top / top.sum(-1, keepdim=True)).to(logits.dtype)


LAYERS: dict[type, Callable[..., Tensor]] = {Attention: attention, Mlp: mlp, Experts: experts}
