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
from torch_impl.collectives import identity_all_reduce
from torch_impl.mesh import Mesh
from torch_impl.online_softmax import attend_back, attend_to, joined, wide

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
    """Q[B, S_cp, H, K] attends to the K and V[B, S_cp, H, K] of one rank after the other."""
    return _Ring.apply(q, k, v, mesh.group(AXIS))  # type: ignore[no-any-return]


def total(share: Tensor, mesh: Mesh) -> dist.Work | None:
    """L = AllReduce_cp(L{U_cp}), in place."""
    return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)


def visible(rank: int, source: int) -> list[tuple[int, int, bool]]:
    """Which of a rank's two pieces attend to which of the source's: (piece of q, piece of k, whether causal)."""
    if source == rank:
        return [(0, 0, True), (1, 0, False), (1, 1, True)]
    return [(0, 0, False), (1, 0, False)] if source < rank else [(1, 0, False), (1, 1, False)]


def around(kv: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Each rank's `kv` in turn, with that rank, this rank's first. The next one arrives while one is used."""
    rank, n = group.rank(), group.size()
    for turn in range(n):
        works, arriving = pass_on(kv, group) if turn < n - 1 else ([], kv)
        yield (rank - turn) % n, kv
        for work in works:
            work.wait()
        kv = arriving


def pass_on(x: Tensor, group: ProcessGroup) -> tuple[list[dist.Work], Tensor]:
    """Start to send `x` to the next rank, and to receive the previous rank's, which is returned."""
    rank, n, x = group.rank(), group.size(), x.contiguous()
    arriving = torch.empty_like(x)
    if n == 1:
        return [], x
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % n)
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % n)
    return dist.batch_isend_irecv([send, receive]), arriving


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
        parts: list[tuple[Tensor, Tensor] | None] = [None, None]  # of each piece: output and log of the sum, so far
        pieces = q.chunk(2, dim=1)
        for source, kv in around(torch.stack((k, v)), group):
            of_source = kv.chunk(2, dim=2)
            for i, j, causal in visible(group.rank(), source):
                k_j, v_j = of_source[j].unbind()
                parts[i] = joined(parts[i], attend_to(pieces[i], k_j, v_j, causal))
        outs, sums = zip(*(part for part in parts if part is not None), strict=True)
        out = torch.cat(outs, dim=1)
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, torch.cat(sums, dim=1))
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, sums = ctx.saved_tensors
        group, dout = ctx.group, wide(grads[0])
        weighted = (dout * out).sum(-1)  # the sum of p dp over the keys
        of_queries = [t.chunk(2, dim=1) for t in (q, dout, sums, weighted)]
        dq, dkv, works = torch.zeros_like(out), torch.zeros_like(torch.stack((k, v))), []
        for source, kv in around(torch.stack((k, v)), group):
            mine = wide(torch.zeros_like(kv))
            for i, j, causal in visible(group.rank(), source):
                (q_i, dout_i, sums_i, weighted_i), (k_j, v_j) = (of[i] for of in of_queries), kv.chunk(2, dim=2)[j]
                dqi, dkvj = attend_back(q_i, dout_i, sums_i, weighted_i, k_j, v_j, causal)
                dq.chunk(2, dim=1)[i].add_(dqi)
                mine.chunk(2, dim=2)[j].add_(dkvj)
            for work in works:
                work.wait()
            works, dkv = pass_on((mine + dkv).to(kv.dtype), group)
        for work in works:
            work.wait()
        return dq.to(q.dtype), dkv[0], dkv[1], None
