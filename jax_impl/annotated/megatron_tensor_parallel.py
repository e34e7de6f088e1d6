"""Megatron's tensor parallel (Shoeybi et al., 1909.08053): even layers split by columns, odd ones by rows, over `tp`.

No collective is written. An odd layer contracts a dim that is split on both sides, H[B, F_tp] @ W[F_tp, D], and XLA has
to sum the partial results; the backward pass does the same at every even layer but the first. B D e bytes each.
"""

from __future__ import annotations

import jax
from jax import Array
from jax.sharding import Mesh

from contract.problem import Batch, Layer
from contract.strategy import Run
from jax_impl.model import MLP, annotations, batch_annotations, place, squared_error

AXIS = "tp"
RULES = {"up_out": AXIS, "down_in": AXIS}


def split_params(params: list[Layer], mesh: Mesh, run: Run) -> list[Layer]:
    """Even layers: W[D, F_tp], b[F_tp]. Odd layers: W[F_tp, D], and the whole b[D]."""
    return place(params, annotations(params, RULES), mesh)


def split_batch(batch: Batch, mesh: Mesh, run: Run) -> Batch:
    """Every rank has the whole batch: X[B, D], Y[B, D]."""
    return place(batch, batch_annotations(RULES), mesh)


def loss(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The mean squared error, a scalar."""
    return squared_error(MLP(params)(batch.x), batch)  # Y[B, D] = H[B, F_tp] @ W[F_tp, D]{U_tp}


def loss_and_grads(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> tuple[Array, list[Layer]]:
    """The loss, and the gradients of a rank's columns and rows."""
    return jax.value_and_grad(loss)(params, batch, mesh, run)
