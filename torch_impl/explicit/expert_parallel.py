"""Expert parallel over `ep`: samples and experts are split, and tokens travel to their experts and back.

Forward: all_to_all before the experts and after them, E B C D e bytes each for a rank's B samples, with C slots of an
expert for every sample. Backward: the same two (Lepikhin et al., 2006.16668). An expert's gradient is whole, because
all tokens that chose it came to it; everything else is replicated: all_reduce of its gradients.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from contract.problem import Batch, split_slices
from contract.transformer import EXPERT_DIMS
from torch_impl.collectives import all_to_all_back, identity_all_reduce
from torch_impl.mesh import Mesh

AXIS = "ep"


def split_params(params: list[Any], mesh: Mesh) -> list[Any]:
    """A rank's experts: up[E_ep, D, F], down[E_ep, F, D]. Everything else is whole."""
    return [mesh.split(layer, EXPERT_DIMS[type(layer)], AXIS) for layer in params]


def split_batch(batch: Batch, mesh: Mesh) -> Batch:
    """A rank's samples: X[B_ep, S, D], Y[B_ep, S, D]."""
    mine = split_slices(len(batch.x), mesh.size(AXIS))[mesh.rank(AXIS)]
    return Batch(batch.x[mine], batch.y[mine], batch.weight[mine])


def weights(layer: Any, mesh: Mesh) -> Any:
    """Backward: dW[D, F] = AllReduce_ep(dW[D, F]{U_ep}) of everything but the experts."""
    pairs = zip(layer, EXPERT_DIMS[type(layer)], strict=True)
    return layer._make(identity_all_reduce(p, mesh.group(AXIS)) if dim is None else p for p, dim in pairs)


def dispatch(h: Tensor, mesh: Mesh) -> Tensor:
    """H[E_ep, B C, D] = AllToAll_ep(H[E, B_ep C, D]): the slots of all ranks, for this rank's experts."""
    return all_to_all_back(h, mesh.group(AXIS), split=0, concat=1)


def combine(h: Tensor, mesh: Mesh) -> Tensor:
    """H[E, B_ep C, D] = AllToAll_ep(H[E_ep, B C, D]): what all experts made of this rank's slots."""
    return all_to_all_back(h, mesh.group(AXIS), split=1, concat=0)


def total(share: Tensor, mesh: Mesh) -> dist.Work | None:
    """L = AllReduce_ep(L{U_ep}), in place."""
    return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)
