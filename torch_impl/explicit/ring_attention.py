"""Ring attention over `cp`: the sequence is split, and keys and values go around a ring (Liu et al., 2310.01889).

Forward: n - 1 permutes of K and V, 2 B S / n D e bytes each, in every attention. Each is sent on while it is attended
to, and the softmax is put together from the parts. Backward: the same again, and n permutes of dK and dV, as large,
which go around with them and come home. Of 2 n pieces of the sequence rank r has the pieces r and 2 n - 1 - r, so that
causal attention is as much work for every rank (zigzag). The parameters are replicated: all_reduce of every gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from contract.problem import Batch
from torch_impl.blocks import Local
from torch_impl.collectives import identity_all_reduce, pass_on
from torch_impl.mesh import Mesh
from torch_impl.online_softmax import attend_back, attend_to, by_heads, join, wide

AXIS = "cp"
REPLICATED = True  # so `torch_impl.buckets` may replace `weights`: it sums the gradients during the backward pass


def split_batch(batch: Batch, mesh: Mesh) -> Batch:
    """A rank's two pieces of the sequence: X[B, S_cp, D], Y[B, S_cp, D]."""
    n, rank = mesh.size(AXIS), mesh.rank(AXIS)
    pieces = [a.chunk(2 * n, dim=1) for a in batch]
    return Batch(*(torch.cat((of[rank], of[2 * n - 1 - rank]), dim=1) for of in pieces))


def weights(layer: Any, mesh: Mesh) -> Any:
    """Every rank has W[D, F] whole. Backward: dW[D, F] = AllReduce_cp(dW[D, F]{U_cp})."""
    return layer._make(identity_all_reduce(p, mesh.group(AXIS)) for p in layer)


def attend(q: Tensor, k: Tensor, v: Tensor, local: Local, mesh: Mesh) -> Tensor:
    """Q[B, S_cp, H, K] attends to the K and V[B, S_cp, H, K] of one rank after the other, without `local`."""
    return _Ring.apply(q, k, v, mesh.group(AXIS))


def total(share: Tensor, mesh: Mesh) -> dist.Work | None:
    """L = AllReduce_cp(L{U_cp}), in place."""
    return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)


def visible(rank: int, source: int, tokens: int) -> tuple[slice, slice]:
    """Which of a rank's tokens attend to which of the source's: slices of the queries and of the keys.

    A rank's pieces are in the order of the sequence, so that among its own tokens the mask is the usual one. A rank
    before it has an earlier first piece and a later second one, and a rank after it the other way round.
    """
    whole, half = slice(0, tokens), tokens // 2
    if source == rank:
        return whole, whole
    return (whole, slice(0, half)) if source < rank else (slice(half, tokens), whole)


def around(kv: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Each rank's `kv` in turn, with that rank, this rank's first. The next one arrives while one is used."""
    rank, n = group.rank(), group.size()
    for turn in range(n):
        works, arriving = pass_on(kv, group) if turn < n - 1 else ([], kv)
        yield (rank - turn) % n, kv
        for work in works:
            work.wait()
        kv = arriving


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
        rank, tokens, queries = group.rank(), q.shape[1], by_heads(q)
        turns = around(by_heads_together(k, v), group)
        _, kv = next(turns)  # this rank's own
        out, sums = attend_to(queries, *wide(kv), causal=True)
        for source, kv in turns:
            rows, columns = visible(rank, source, tokens)
            part = attend_to(queries[:, :, rows], *wide(kv[..., columns, :]), causal=False)
            join((out[:, :, rows], sums[:, :, rows]), part)
        out = out.transpose(1, 2).contiguous()
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, sums)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, sums = ctx.saved_tensors
        group, rank, tokens = ctx.group, ctx.group.rank(), q.shape[1]
        of_queries = by_heads(q), by_heads(grads[0]), out.transpose(1, 2), sums
        turns = around(by_heads_together(k, v), group)
        _, kv = next(turns)  # this rank's own
        dq, *mine = attend_back(*of_queries, *wide(kv), causal=True)
        works, dkv = pass_on(torch.stack(mine).to(kv.dtype), group)
        for source, kv in turns:
            rows, columns = visible(rank, source, tokens)
            of_rows = (a[:, :, rows] for a in of_queries)
            dqi, *mine = attend_back(*of_rows, *wide(kv[..., columns, :]), causal=False)
            dq[:, :, rows] += dqi
            for work in works:
                work.wait()
            dkv = wide(dkv)
            for total, part in zip(dkv, mine, strict=True):
                total[..., columns, :] += part
            works, dkv = pass_on(dkv.to(kv.dtype), group)
        for work in works:
            work.wait()
        dk, dv = dkv.transpose(2, 3)
        return dq.transpose(1, 2).to(q.dtype), dk, dv, None


def by_heads_together(k: Tensor, v: Tensor) -> Tensor:
    """K and V as one [2, B, H, S, K] of their own dtype, which is what goes around."""
    return torch.stack((k.transpose(1, 2), v.transpose(1, 2)))
