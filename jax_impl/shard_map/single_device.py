"""One device, no communication: what every strategy must equal."""

from __future__ import annotations

import jax
from jax import Array
from jax.sharding import Mesh

from contract.problem import Batch, Layer
from contract.strategy import Run
from jax_impl.model import gelu, squared_error

AXIS = None


def split_params(params: list[Layer], mesh: Mesh, run: Run) -> list[Layer]:
    """Whole parameters: W[D, F], b[F]."""
    return jax.device_put(params, mesh.devices.item())


def split_batch(batch: Batch, mesh: Mesh, run: Run) -> Batch:
    """The whole batch: X[B, D]."""
    return jax.device_put(batch, mesh.devices.item())


def loss(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The mean squared error, a scalar."""
    x = batch.x
    for w, b in params:
        x = gelu(x @ w + b)  # Y[B, F] = X[B, D] @ W[D, F]
    return squared_error(x, batch)


def loss_and_grads(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> tuple[Array, list[Layer]]:
    """The loss and the gradient of every parameter."""
    return jax.value_and_grad(loss)(params, batch, mesh, run)
