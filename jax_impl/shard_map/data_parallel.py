"""Data parallel: the batch split by samples over `dp`, every rank with the whole model.

Forward: every rank's loss is its samples' share of the mean over all samples, and one psum adds them. Backward,
derived: the parameters enter replicated and are used differently by every rank, so their gradients are all_reduced,
L (D^2 + D) e bytes. It is the transpose of that use, and nobody writes it.
"""

from __future__ import annotations

import jax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from contract.problem import Batch, Layer, pad_batch
from contract.strategy import Run
from jax_impl.collectives import all_reduce
from jax_impl.model import gelu, place, squared_error

AXIS = "dp"
BATCH = Batch(P(AXIS), P(AXIS), P(AXIS))


def split_params(params: list[Layer], mesh: Mesh, run: Run) -> list[Layer]:
    """Every rank has the whole model: W[D, F], b[F]."""
    return place(params, P(), mesh)


def split_batch(batch: Batch, mesh: Mesh, run: Run) -> Batch:
    """A rank's samples, filled up to the common number: X[B_dp, D], Y[B_dp, D]."""
    return place(pad_batch(batch, mesh.size), BATCH, mesh)


def loss(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The mean squared error over the samples of all ranks, a scalar, the same on every rank."""

    @jax.shard_map(mesh=mesh, in_specs=(P(), BATCH), out_specs=P())
    def per_rank(params: list[Layer], batch: Batch) -> Array:
        x = batch.x
        for w, b in params:
            x = gelu(x @ w + b)  # Y[B_dp, F] = X[B_dp, D] @ W[D, F]
        return all_reduce(squared_error(x, batch), AXIS)  # L = AllReduce_dp(L{U_dp})

    return per_rank(params, batch)


def loss_and_grads(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> tuple[Array, list[Layer]]:
    """The loss, and the gradients summed over all ranks: dW[D, F] = AllReduce_dp(dW[D, F]{U_dp})."""
    return jax.value_and_grad(loss)(params, batch, mesh, run)
