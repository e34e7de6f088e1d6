"""Tensor parallel: every W and b split by columns over `tp`; activations gathered between layers.

Forward: all_gather of the activations before every layer but the first. Backward: reduce_scatter of their gradients,
its dual. B D e bytes each, 2 (L - 1) times: the last layer's output stays split, because the loss can be taken on the
shards and summed by one scalar all_reduce, and the first layer's input needs no gradient.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from contract.problem import Batch, Layer
from contract.strategy import Run
from torch_impl.collectives import all_gather_reduce_scatter, all_reduce_identity
from torch_impl.model import clear_grads, gelu, grads_of, squared_error

AXIS = "tp"


def split_params(params: list[Layer], mesh: DeviceMesh, run: Run) -> list[Layer]:
    """A rank's columns: W[D, F_tp], b[F_tp]."""
    rank, n = mesh.get_local_rank(AXIS), mesh.size()
    return [Layer(w.chunk(n, dim=1)[rank], b.chunk(n)[rank]) for w, b in params]


def split_batch(batch: Batch, mesh: DeviceMesh, run: Run) -> Batch:
    """Every input, and the targets of a rank's columns: X[B, D], Y[B, F_tp]."""
    rank, n = mesh.get_local_rank(AXIS), mesh.size()
    return batch._replace(y=batch.y.chunk(n, dim=1)[rank])


def loss(params: list[Layer], batch: Batch, mesh: DeviceMesh, run: Run) -> Tensor:
    """The mean squared error, a scalar, the same on every rank."""
    group = mesh.get_group(AXIS)
    x = batch.x
    for i, (w, b) in enumerate(params):
        if i > 0:
            x = all_gather_reduce_scatter(x, group, dim=1)  # X[B, D] = AllGather_tp(Y[B, D_tp])
        x = gelu(x @ w + b)  # Y[B, F_tp] = X[B, D] @ W[D, F_tp]
    return all_reduce_identity(squared_error(x, batch), group)  # L = AllReduce_tp(L{U_tp})


def loss_and_grads(params: list[Layer], batch: Batch, mesh: DeviceMesh, run: Run) -> tuple[Tensor, list[Layer]]:
    """The loss, and the gradients of a rank's columns. The reduce_scatters are in the backward pass of the gathers."""
    clear_grads(params)
    total = loss(params, batch, mesh, run)
    total.backward()
    return total.detach(), grads_of(params)
