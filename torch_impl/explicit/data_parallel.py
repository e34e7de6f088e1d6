"""Data parallel: the batch is split by samples over `dp`, and every rank holds the whole model (Li et al., 2006.15704).

Backward: all_reduce of every gradient, L (D^2 + D) e bytes. Each rank's loss is its samples' share of the mean over all
samples, so the sum over ranks is the mean, also where ranks have different numbers of samples.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from contract.problem import Batch, split_slices
from torch_impl.collectives import identity_all_reduce
from torch_impl.mesh import Mesh

AXIS = "dp"
REPLICATED = True  # so `torch_impl.buckets` may replace `weights`: it sums the gradients during the backward pass


def split_batch(batch: Batch, mesh: Mesh) -> Batch:
    """A rank's samples: X[B_dp, D], Y[B_dp, D]."""
    mine = split_slices(len(batch.x), mesh.size(AXIS))[mesh.rank(AXIS)]
    return Batch(batch.x[mine], batch.y[mine], batch.weight[mine])


def weights(layer: Any, mesh: Mesh) -> Any:
    """Every rank has W[D, F] and b[F] whole. Backward: dW[D, F] = AllReduce_dp(dW[D, F]{U_dp})."""
    return layer._make(identity_all_reduce(p, mesh.group(AXIS)) for p in layer)


def total(share: Tensor, mesh: Mesh) -> dist.Work | None:
    """L = AllReduce_dp(L{U_dp}), in place."""
    return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)
