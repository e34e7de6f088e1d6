"""Megatron's tensor parallel (Shoeybi et al., 1909.08053): even layers split by columns, odd ones by rows, over `tp`.

The columns of an even W produce just those activations that the rows of the next W need, so a pair of layers needs no
communication between its two. Forward: one all_reduce after every pair (g). Backward: one before every pair (f), but
not the first, whose input needs no gradient. B D e bytes each, L - 1 times.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from contract.problem import Batch, Layer
from contract.strategy import Run
from torch_impl.collectives import all_reduce_identity, identity_all_reduce
from torch_impl.model import clear_grads, gelu, grads_of, squared_error

AXIS = "tp"


def split_params(params: list[Layer], mesh: DeviceMesh, run: Run) -> list[Layer]:
    """Even layers: W[D, F_tp], b[F_tp]. Odd layers: W[F_tp, D], and the whole b[D]."""
    rank, n = mesh.get_local_rank(AXIS), mesh.size()
    return [
        Layer(w.chunk(n, dim=0)[rank], b) if i % 2 else Layer(w.chunk(n, dim=1)[rank], b.chunk(n)[rank])
        for i, (w, b) in enumerate(params)
    ]


def split_batch(batch: Batch, mesh: DeviceMesh, run: Run) -> Batch:
    """Every rank has the whole batch: X[B, D], Y[B, D]."""
    return batch


def loss(params: list[Layer], batch: Batch, mesh: DeviceMesh, run: Run) -> Tensor:
    """The mean squared error, a scalar, the same on every rank."""
    group = mesh.get_group(AXIS)
    x = batch.x
    for i in range(0, len(params), 2):
        (w_up, b_up), (w_down, b_down) = params[i : i + 2]
        x = identity_all_reduce(x, group)  # f
        h = gelu(x @ w_up + b_up)  # H[B, F_tp] = X[B, D] @ W[D, F_tp]
        y = all_reduce_identity(h @ w_down, group)  # g: Y[B, D] = AllReduce_tp(H[B, F_tp] @ W[F_tp, D]{U_tp})
        x = gelu(y + b_down)  # the bias once, after the sum
    return squared_error(x, batch)


def loss_and_grads(params: list[Layer], batch: Batch, mesh: DeviceMesh, run: Run) -> tuple[Tensor, list[Layer]]:
    """The loss, and the gradients of a rank's columns and rows. The backward all_reduces are those of f."""
    clear_grads(params)
    total = loss(params, batch, mesh, run)
    total.backward()
    return total.detach(), grads_of(params)
