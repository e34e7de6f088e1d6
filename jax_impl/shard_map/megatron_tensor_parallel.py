"""Megatron's tensor parallel (Shoeybi et al., 1909.08053): even layers split by columns, odd ones by rows, over `tp`.

The columns of an even W produce just those activations that the rows of the next W need, so a pair of layers needs no
communication between its two. Forward: one all_reduce after every pair (g). Backward, derived: one before every pair,
the transpose of `varying` (f), but not the first, whose input needs no gradient. B D e bytes each, L - 1 times.
"""

from __future__ import annotations

import jax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from contract.problem import Batch, Layer
from contract.strategy import Run
from jax_impl.collectives import all_reduce, varying
from jax_impl.model import gelu, place, squared_error

AXIS = "tp"
COLUMNS, ROWS = Layer(P(None, AXIS), P(AXIS)), Layer(P(AXIS), P())


def split_params(params: list[Layer], mesh: Mesh, run: Run) -> list[Layer]:
    """Even layers: W[D, F_tp], b[F_tp]. Odd layers: W[F_tp, D], and the whole b[D]."""
    return place(params, [COLUMNS, ROWS] * (len(params) // 2), mesh)


def split_batch(batch: Batch, mesh: Mesh, run: Run) -> Batch:
    """Every rank has the whole batch: X[B, D], Y[B, D]."""
    return place(batch, P(), mesh)


def loss(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The mean squared error, a scalar, the same on every rank."""

    @jax.shard_map(mesh=mesh, in_specs=([COLUMNS, ROWS] * (len(params) // 2), P()), out_specs=P())
    def per_rank(params: list[Layer], batch: Batch) -> Array:
        x = batch.x
        for i in range(0, len(params), 2):
            (w_up, b_up), (w_down, b_down) = params[i : i + 2]
            x = varying(x, AXIS)  # f
            h = gelu(x @ w_up + b_up)  # H[B, F_tp] = X[B, D] @ W[D, F_tp]
            y = all_reduce(h @ w_down, AXIS)  # g: Y[B, D] = AllReduce_tp(H[B, F_tp] @ W[F_tp, D]{U_tp})
            x = gelu(y + b_down)  # the bias once, after the sum
        return squared_error(x, batch)

    return per_rank(params, batch)


def loss_and_grads(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> tuple[Array, list[Layer]]:
    """The loss, and the gradients of a rank's columns and rows. The backward all_reduces are the transposes of f."""
    return jax.value_and_grad(loss)(params, batch, mesh, run)
