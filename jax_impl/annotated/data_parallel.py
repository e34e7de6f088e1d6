"""Data parallel: the batch split by samples over `dp`, every rank with the whole model.

No collective is written. The loss is a sum over all samples and a gradient is too, X^T[D, B_dp] @ dY[B_dp, F] with B
contracted and split: XLA has to all_reduce both, L (D^2 + D) e bytes and a scalar.
"""

from __future__ import annotations

import jax
from jax import Array
from jax.sharding import Mesh

from contract.problem import Batch, Layer, pad_batch
from contract.strategy import Run
from jax_impl.model import MLP, annotations, batch_annotations, place, squared_error

AXIS = "dp"
RULES = {"batch": AXIS}


def split_params(params: list[Layer], mesh: Mesh, run: Run) -> list[Layer]:
    """Every rank has the whole model: W[D, F], b[F]."""
    return place(params, annotations(params, RULES), mesh)


def split_batch(batch: Batch, mesh: Mesh, run: Run) -> Batch:
    """A rank's samples, filled up to the common number: X[B_dp, D], Y[B_dp, D]."""
    return place(pad_batch(batch, mesh.size), batch_annotations(RULES), mesh)


def loss(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The mean squared error over the samples of all ranks, a scalar."""
    return squared_error(MLP(params)(batch.x), batch)  # Y[B_dp, F] = X[B_dp, D] @ W[D, F]; L = sum over B_dp


def loss_and_grads(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> tuple[Array, list[Layer]]:
    """The loss, and the gradients summed over all ranks: XLA derives the all_reduce."""
    return jax.value_and_grad(loss)(params, batch, mesh, run)
