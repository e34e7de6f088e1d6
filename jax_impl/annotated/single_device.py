"""One device, no communication: what every strategy must equal."""

from __future__ import annotations

import jax
from jax import Array
from jax.sharding import Mesh

from contract.problem import Batch, Layer
from contract.strategy import Run
from jax_impl.model import MLP, annotations, batch_annotations, place, squared_error

AXIS = None
RULES: dict[str, str] = {}


def split_params(params: list[Layer], mesh: Mesh, run: Run) -> list[Layer]:
    """Whole parameters: W[D, F], b[F]."""
    return place(params, annotations(params, RULES), mesh)


def split_batch(batch: Batch, mesh: Mesh, run: Run) -> Batch:
    """The whole batch: X[B, D]."""
    return place(batch, batch_annotations(RULES), mesh)


def loss(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The mean squared error, a scalar."""
    return squared_error(MLP(params)(batch.x), batch)


def loss_and_grads(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> tuple[Array, list[Layer]]:
    """The loss and the gradient of every parameter."""
    return jax.value_and_grad(loss)(params, batch, mesh, run)
