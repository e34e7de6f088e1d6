"""Context parallel over `cp`: the sequence is split, and every rank gathers keys and values.

Forward: all_gather of K and of V, B S D e bytes each, in every attention. Backward: reduce_scatter of their gradients,
as many (Llama 3, 2407.21783, section 3.3.2). The parameters are replicated: all_reduce of every gradient.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from contract.problem import Batch
from torch_impl.blocks import Local
from torch_impl.collectives import all_gather_reduce_scatter, identity_all_reduce
from torch_impl.mesh import Mesh

AXIS = "cp"
REPLICATED = True  # so `torch_impl.buckets` may replace `weights`: it sums the gradients during the backward pass


def split_batch(batch: Batch, mesh: Mesh) -> Batch:
    """A rank's part of the sequence: X[B, S_cp, D], Y[B, S_cp, D]."""
    return Batch(*(a.chunk(mesh.size(AXIS), dim=1)[mesh.rank(AXIS)] for a in batch))


def weights(layer: Any, mesh: Mesh) -> Any:
    """Every rank has W[D, F] whole. Backward: dW[D, F] = AllReduce_cp(dW[D, F]{U_cp})."""
    return layer._make(identity_all_reduce(p, mesh.group(AXIS)) for p in layer)


def attend(q: Tensor, k: Tensor, v: Tensor, local: Local, mesh: Mesh) -> Tensor:
    """Q[B, S_cp, H, K] attends to K, V[B, S, H, K] = AllGather_cp(K, V[B, S_cp, H, K])."""
    k, v = (all_gather_reduce_scatter(a, mesh.group(AXIS), dim=1) for a in (k, v))
    return local(q, k, v, mesh.rank(AXIS) * q.shape[1])


def total(share: Tensor, mesh: Mesh) -> dist.Work | None:
    """L = AllReduce_cp(L{U_cp}), in place."""
    return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)
