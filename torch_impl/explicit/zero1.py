"""ZeRO-1: data parallel over `fsdp` whose optimizer state is split by the rows of the parameters.

Backward: all_reduce of every gradient, L (D^2 + D) e bytes. Update: each rank updates its rows of every parameter, and
the updated rows are gathered, as many bytes (Rajbhandari et al., 1910.02054, section 5.1).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from contract.problem import Batch, split_slices
from shardiff.ranks.torch_versions import all_gather_single
from torch_impl.collectives import identity_all_reduce
from torch_impl.mesh import Mesh

AXIS = "fsdp"
REPLICATED = True  # so `torch_impl.buckets` may replace `weights`: it sums the gradients during the backward pass


def split_batch(batch: Batch, mesh: Mesh) -> Batch:
    """A rank's samples: X[B_fsdp, D], Y[B_fsdp, D]."""
    mine = split_slices(len(batch.x), mesh.size(AXIS))[mesh.rank(AXIS)]
    return Batch(batch.x[mine], batch.y[mine], batch.weight[mine])


def weights(layer: Any, mesh: Mesh) -> Any:
    """Every rank has W[D, F] and b[F] whole. Backward: dW[D, F] = AllReduce_fsdp(dW[D, F]{U_fsdp})."""
    return layer._make(identity_all_reduce(p, mesh.group(AXIS)) for p in layer)


def own(layer: Any, mesh: Mesh) -> Any:
    """The rows that a rank updates: W[D_fsdp, F] of W[D, F], b[F_fsdp] of b[F], and so of their gradients."""
    return layer._make(p.chunk(mesh.size(AXIS))[mesh.rank(AXIS)] for p in layer)


def whole(layer: Any, mesh: Mesh) -> list[dist.Work | None]:
    """W[D, F] = AllGather_fsdp(W[D_fsdp, F]), in place: each rank has updated its rows where they are."""
    group = mesh.group(AXIS)
    pairs = zip(layer, own(layer, mesh), strict=True)
    return [all_gather_single(p.detach(), mine.detach(), group=group, async_op=True) for p, mine in pairs]


def total(share: Tensor, mesh: Mesh) -> dist.Work | None:
    """L = AllReduce_fsdp(L{U_fsdp}), in place."""
    return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)
