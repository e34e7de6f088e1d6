"""Ulysses over `cp`: the sequence is split, but in attention the heads are (Jacobs et al., 2309.14509).

Forward: all_to_all of Q, K, V and of the output, B S / n D e bytes each, in every attention. Backward: the same four.
The parameters are replicated: all_reduce of every gradient.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from contract.problem import Batch
from torch_impl.blocks import Local
from torch_impl.collectives import all_to_all_back, identity_all_reduce
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
    """Q, K, V[B, S, H_cp, K] = AllToAll_cp(Q, K, V[B, S_cp, H, K]); and back for O[B, S_cp, H, K]."""
    group = mesh.group(AXIS)
    q, k, v = (all_to_all_back(a, group, split=2, concat=1) for a in (q, k, v))
    return all_to_all_back(local(q, k, v), group, split=1, concat=2)


def total(share: Tensor, mesh: Mesh) -> dist.Work | None:
    """L = AllReduce_cp(L{U_cp}), in place."""
    return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)
