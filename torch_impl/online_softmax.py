"""Attention to some of the keys at a time, put together with an online softmax (Milakov and Gimelshein, 1805.02867).

Of every part two things are known: its output, normalized by the part's own sum, and the logarithm of that sum. From
these follow both of the whole, and the backward pass of a part needs those of the whole alone (FlashAttention,
2205.14135, appendix B). All sums are in float32 at least.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.float() if x.dtype == torch.bfloat16 else x


def scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """[B, S, H, T] of q[B, S, H, K] and k[B, T, H, K]. causal: a query sees the keys up to its own number."""
    found = wide(torch.einsum("bshk,bthk->bsht", q, k)) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
        found = found.masked_fill(hidden[:, None], -torch.inf)
    return found


def attend_to(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The output of a part [B, S, H, K], and the logarithm of its sum [B, S, H]."""
    found = scores(q, k, causal)
    total = found.logsumexp(-1)
    p = (found - total[..., None]).exp()
    return torch.einsum("bsht,bthk->bshk", p, wide(v)), total


def joined(one: tuple[Tensor, Tensor] | None, other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two parts as one: each output is weighted with its share of the sum of both."""
    if one is None:
        return other
    total = torch.logaddexp(one[1], other[1])
    weighted = [out * (of_part - total).exp()[..., None] for out, of_part in (one, other)]
    return weighted[0] + weighted[1], total


def attend_back(
    q: Tensor, dout: Tensor, total: Tensor, weighted: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of a part: dq[B, S, H, K], and dk and dv as one [2, B, T, H, K].

    total: of the whole. weighted: sum(dout * out) of the whole, over K.
    """
    p = (scores(q, k, causal) - total[..., None]).exp()
    ds = p * (torch.einsum("bshk,bthk->bsht", dout, wide(v)) - weighted[..., None]) * q.shape[-1] ** -0.5
    dk = torch.einsum("bsht,bshk->bthk", ds, wide(q))
    dv = torch.einsum("bsht,bshk->bthk", p, dout)
    return torch.einsum("bsht,bthk->bshk", ds, wide(k)), torch.stack((dk, dv))
