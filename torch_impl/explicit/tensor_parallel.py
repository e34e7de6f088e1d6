"""Tensor parallel: every W and b is split by columns over `tp`, and activations are gathered between layers.

Forward: all_gather of the activations before every layer but the first. Backward: reduce_scatter of their gradients,
its transpose. B D e bytes each, 2 (L - 1) times: the last layer's output stays split, because the loss can be taken on
the shards and summed by one scalar all_reduce, and the first layer's input needs no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from contract.problem import Batch, Layer
from torch_impl.collectives import all_gather_reduce_scatter
from torch_impl.mesh import Mesh
from torch_impl.model import gelu

AXIS = "tp"


def split_params(params: list[Layer], mesh: Mesh) -> list[Layer]:
    """A rank's columns: W[D, F_tp], b[F_tp]."""
    rank, n = mesh.rank(AXIS), mesh.size(AXIS)
    return [Layer(w.chunk(n, dim=1)[rank], b.chunk(n)[rank]) for w, b in params]


def split_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Every input, and the targets of a rank's columns: X[B, D], Y[B, F_tp]."""
    rank, n = mesh.rank(AXIS), mesh.size(AXIS)
    return batch._replace(y=batch.y.chunk(n, dim=1)[rank])


def forward(params: Iterable[Layer], x: Tensor, mesh: Mesh) -> Tensor:
    """All layers. Their output is split, X[B, D_tp], and so is an input that another stage has computed."""
    for w, b in params:
        if x.shape[1] < w.shape[0]:
            x = all_gather_reduce_scatter(x, mesh.group(AXIS), dim=1)  # X[B, D] = AllGather_tp(Y[B, D_tp])
        x = gelu(x @ w + b)  # Y[B, F_tp] = X[B, D] @ W[D, F_tp]
    return x


def total(share: Tensor, mesh: Mesh) -> dist.Work | None:
    """L = AllReduce_tp(L{U_tp}), in place."""
    return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)
