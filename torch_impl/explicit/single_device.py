"""One device, no communication: what every strategy must equal."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from contract.problem import Batch, Layer
from contract.strategy import Run
from torch_impl.model import clear_grads, gelu, grads_of, squared_error

AXIS = None


def split_params(params: list[Layer], mesh: DeviceMesh, run: Run) -> list[Layer]:
    """Whole parameters: W[D, F], b[F]."""
    return params


def split_batch(batch: Batch, mesh: DeviceMesh, run: Run) -> Batch:
    """The whole batch: X[B, D]."""
    return batch


def loss(params: list[Layer], batch: Batch, mesh: DeviceMesh, run: Run) -> Tensor:
    """The mean squared error, a scalar."""
    x = batch.x
    for w, b in params:
        x = gelu(x @ w + b)  # Y[B, F] = X[B, D] @ W[D, F]
    return squared_error(x, batch)


def loss_and_grads(params: list[Layer], batch: Batch, mesh: DeviceMesh, run: Run) -> tuple[Tensor, list[Layer]]:
    """The loss and the gradient of every parameter."""
    clear_grads(params)
    total = loss(params, batch, mesh, run)
    total.backward()
    return total.detach(), grads_of(params)
