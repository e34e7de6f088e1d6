"""Fully sharded data parallel, or ZeRO-3: samples and the rows of every parameter are split over `fsdp`.

Forward: a layer is gathered before it is used, L (D^2 + D) e bytes in total. Backward: reduce_scatter of every
gradient, as many bytes; and, unless the gathered layers are kept, all_gather of every w but the first layer's, whose
input needs no gradient (Rajbhandari et al., 1910.02054; Zhao et al., 2304.11277). Otherwise a layer's w and b travel
together, through one flat buffer.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from contract.problem import Batch, split_slices
from torch_impl.collectives import all_gather_reduce_scatter_flat
from torch_impl.mesh import Mesh

AXIS = "fsdp"
GATHERS = True  # so `torch_impl.prefetch` may replace `weights`: it gathers a layer while the one before computes


def split_params(params: list[Any], mesh: Mesh) -> list[Any]:
    """A rank's rows: W[D_fsdp, F], b[F_fsdp]."""
    rank, n = mesh.rank(AXIS), mesh.size(AXIS)
    return [layer._make(p.chunk(n)[rank] for p in layer) for layer in params]


def split_batch(batch: Batch, mesh: Mesh) -> Batch:
    """A rank's samples: X[B_fsdp, D], Y[B_fsdp, D]."""
    mine = split_slices(len(batch.x), mesh.size(AXIS))[mesh.rank(AXIS)]
    return Batch(batch.x[mine], batch.y[mine], batch.weight[mine])


def weights(layer: Any, mesh: Mesh) -> Any:
    """W[D, F] = AllGather_fsdp(W[D_fsdp, F]). Backward: dW[D_fsdp, F] = ReduceScatter_fsdp(dW[D, F]{U_fsdp})."""
    return layer._make(all_gather_reduce_scatter_flat(layer, mesh.group(AXIS)))


def total(share: Tensor, mesh: Mesh) -> dist.Work | None:
    """L = AllReduce_fsdp(L{U_fsdp}), in place."""
    return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)
