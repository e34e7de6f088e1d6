"""ZeRO-2: data parallel over `fsdp` whose gradients and optimizer state are split by the rows of the parameters.

Backward: reduce_scatter of every gradient, L (D^2 + D) e bytes. Update: each rank updates its rows of every parameter,
and the updated rows are gathered, as many bytes (Rajbhandari et al., 1910.02054, section 5.2).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from contract.problem import Batch, split_slices
from shardiff.ranks.torch_versions import all_gather_single
from torch_impl.collectives import reduce_scatter_flat
from torch_impl.mesh import Mesh

AXIS = "fsdp"


def split_batch(batch: Batch, mesh: Mesh) -> Batch:
    """A rank's samples: X[B_fsdp, D], Y[B_fsdp, D]."""
    mine = split_slices(len(batch.x), mesh.size(AXIS))[mesh.rank(AXIS)]
    return Batch(batch.x[mine], batch.y[mine], batch.weight[mine])


def gradients(layer: Any, mesh: Mesh) -> Any:
    """dW[D_fsdp, F] = ReduceScatter_fsdp(dW[D, F]{U_fsdp}), after the backward pass."""
    return layer._make(reduce_scatter_flat(layer, mesh.group(AXIS)))


def own(layer: Any, mesh: Mesh) -> Any:
    """The rows that a rank updates: W[D_fsdp, F] of W[D, F], b[F_fsdp] of b[F]."""
    return layer._make(p.chunk(mesh.size(AXIS))[mesh.rank(AXIS)] for p in layer)


def whole(layer: Any, mesh: Mesh) -> list[dist.Work | None]:
    """W[D, F] = AllGather_fsdp(W[D_fsdp, F]), in place: each rank has updated its rows where they are."""
    group = mesh.group(AXIS)
    pairs = zip(layer, own(layer, mesh), strict=True)
    return [all_gather_single(p.detach(), mine.detach(), group=group, async_op=True) for p, mine in pairs]


def total(share: Tensor, mesh: Mesh) -> dist.Work | None:
    """L = AllReduce_fsdp(L{U_fsdp}), in place."""
    return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)
