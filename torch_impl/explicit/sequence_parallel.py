"""Tensor parallel whose residual stream is split by the sequence, over `tp` (Korthikanti et al., 2205.05198).

Between the layers a rank has its part of the sequence, so norms and residuals are computed once and not on every rank.
Forward: all_gather before every layer, and reduce_scatter after it, in place of the all_reduce. Backward: their
transposes. B S D e bytes each, so 4 of each in a block, as many bytes as tensor parallel sends. A gain is used on a
part of the sequence, so its gradient is summed, D e bytes.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from contract.problem import Batch
from contract.transformer import TENSOR_DIMS
from torch_impl.collectives import all_gather_reduce_scatter, identity_all_reduce, reduce_scatter_all_gather
from torch_impl.mesh import Mesh

AXIS = "tp"


def split_params(params: list[Any], mesh: Mesh) -> list[Any]:
    """q, k, v[D, (H K)_tp], o[(H K)_tp, D]; up[D, F_tp], down[F_tp, D]; gains and router are whole."""
    return [mesh.split(layer, TENSOR_DIMS[type(layer)], AXIS) for layer in params]


def split_batch(batch: Batch, mesh: Mesh) -> Batch:
    """A rank's part of the sequence: X[B, S_tp, D], Y[B, S_tp, D]."""
    return Batch(*(a.chunk(mesh.size(AXIS), dim=1)[mesh.rank(AXIS)] for a in batch))


def weights(layer: Any, mesh: Mesh) -> Any:
    """Backward: dgain[D] = AllReduce_tp(dgain[D]{U_tp}), and so the router's. Everything else is used as it is."""
    summed = {
        name: identity_all_reduce(getattr(layer, name), mesh.group(AXIS))
        for name in ("gain", "router")
        if name in layer._fields
    }
    return layer._replace(**summed)


def enter(x: Tensor, mesh: Mesh) -> Tensor:
    """X[B, S, D] = AllGather_tp(X[B, S_tp, D]). Backward: dX[B, S_tp, D] = ReduceScatter_tp(dX[B, S, D]{U_tp})."""
    return all_gather_reduce_scatter(x, mesh.group(AXIS), dim=1)


def leave(y: Tensor, mesh: Mesh) -> Tensor:
    """Y[B, S_tp, D] = ReduceScatter_tp(Y[B, S, D]{U_tp}). Backward: dY[B, S, D] = AllGather_tp(dY[B, S_tp, D])."""
    return reduce_scatter_all_gather(y, mesh.group(AXIS), dim=1)


def total(share: Tensor, mesh: Mesh) -> dist.Work | None:
    """L = AllReduce_tp(L{U_tp}), in place."""
    return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)
