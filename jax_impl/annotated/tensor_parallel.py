"""Tensor parallel: every W and b split by columns over `tp`.

No collective is written. A layer's output comes out split by columns and the next layer contracts that dim with the
whole rows of its W, so XLA has to gather it, B D e bytes; the gradient of the gathered input is a sum over ranks, which
it may reduce_scatter, or all_reduce and slice.
"""

from __future__ import annotations

import jax
from jax import Array
from jax.sharding import Mesh

from contract.problem import Batch, Layer
from contract.strategy import Run
from jax_impl.model import MLP, annotations, batch_annotations, place, squared_error

AXIS = "tp"
RULES = {"up_out": AXIS, "down_out": AXIS, "features": AXIS}


def split_params(params: list[Layer], mesh: Mesh, run: Run) -> list[Layer]:
    """A rank's columns: W[D, F_tp], b[F_tp]."""
    return place(params, annotations(params, RULES), mesh)


def split_batch(batch: Batch, mesh: Mesh, run: Run) -> Batch:
    """Every input, and the targets of a rank's columns: X[B, D], Y[B, F_tp]."""
    return place(batch, batch_annotations(RULES), mesh)


def loss(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The mean squared error, a scalar."""
    return squared_error(MLP(params)(batch.x), batch)  # Y[B, F_tp] = X[B, D] @ W[D, F_tp]


def loss_and_grads(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> tuple[Array, list[Layer]]:
    """The loss, and the gradients of a rank's columns."""
    return jax.value_and_grad(loss)(params, batch, mesh, run)
