"""Attention to some of the keys at a time, put together with an online softmax (Milakov and Gimelshein, 1805.02867).

Of every part two things are known: its output, normalized by the part's own sum, and the logarithm of that sum. From
these follow both of the whole, and the backward pass of a part needs those of the whole alone (FlashAttention,
2205.14135, appendix B).

Everything is in float32 at least, with the heads before the sequence, so that a product is one for each head: queries
[B, H, S, K], keys and values [B, H, T, K], logarithms of sums [B, H, S, 1]. Where torch has one kernel for all of a
part, that is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_impl import fused_attention


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.float() if x.dtype == torch.bfloat16 else x


def by_heads(x: Tensor) -> Tensor:
    """[B, H, S, K] of [B, S, H, K], in float32 at least."""
    return wide(x.transpose(1, 2).contiguous())


def scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """q k^T / sqrt(K), [B, H, S, T]. causal: a query sees the keys up to its own number."""
    found = (q @ k.mT).mul_(q.shape[-1] ** -0.5)
    if causal:
        found += found.new_full(found.shape[-2:], -torch.inf).triu_(1)
    return found


def attend_to(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The output of a part [B, H, S, K], and the logarithm of its sum."""
    if fused_attention.usable(q):
        return fused_attention.attend_to(q, k, v, causal)
    p = scores(q, k, causal)
    most = p.amax(-1, keepdim=True)
    total = p.sub_(most).exp_().sum(-1, keepdim=True)
    return (p @ v).div_(total), total.log_().add_(most)


def join(whole: tuple[Tensor, Tensor], part: tuple[Tensor, Tensor]) -> None:
    """Add a part to what is known so far, in place: each output is weighted with its share of the sum of both."""
    (out, so_far), (new, of_part) = whole, part
    total = torch.logaddexp(so_far, of_part)
    out.mul_(so_far.sub_(total).exp_()).add_(new.mul_(of_part.sub_(total).exp_()))
    so_far.copy_(total)


def attend_back(
    q: Tensor, dout: Tensor, out: Tensor, total: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a part: of q, k and v.

    out, total: of the whole.
    """
    if fused_attention.usable(q):
        return fused_attention.attend_back(q, dout, out, total, k, v, causal)
    weighted = (dout * out).sum(-1, keepdim=True)  # the sum of p dp over all keys
    p = scores(q, k, causal).sub_(total).exp_()
    dv = p.mT @ dout
    ds = (dout @ v.mT).sub_(weighted).mul_(p).mul_(q.shape[-1] ** -0.5)
    return ds @ k, ds.mT @ q, dv
