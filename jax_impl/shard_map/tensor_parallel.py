"""Tensor parallel: every W and b split by columns over `tp`; activations gathered between layers.

Forward: all_gather of the activations before every layer but the first. Backward, derived: reduce_scatter of their
gradients, its transpose. B D e bytes each, 2 (L - 1) times: the last layer's output stays split, because the loss can
be taken on the shards and summed by one scalar psum, and the first layer's input needs no gradient.
"""

from __future__ import annotations

import jax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from contract.problem import Batch, Layer
from contract.strategy import Run
from jax_impl.collectives import all_gather, all_reduce
from jax_impl.model import gelu, place, squared_error

AXIS = "tp"
LAYER = Layer(P(None, AXIS), P(AXIS))
BATCH = Batch(P(), P(None, AXIS), P())


def split_params(params: list[Layer], mesh: Mesh, run: Run) -> list[Layer]:
    """A rank's columns: W[D, F_tp], b[F_tp]."""
    return place(params, [LAYER] * len(params), mesh)


def split_batch(batch: Batch, mesh: Mesh, run: Run) -> Batch:
    """Every input, and the targets of a rank's columns: X[B, D], Y[B, F_tp]."""
    return place(batch, BATCH, mesh)


def loss(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The mean squared error, a scalar, the same on every rank."""

    @jax.shard_map(mesh=mesh, in_specs=([LAYER] * len(params), BATCH), out_specs=P())
    def per_rank(params: list[Layer], batch: Batch) -> Array:
        x = batch.x
        for i, (w, b) in enumerate(params):
            if i > 0:
                x = all_gather(x, AXIS, dim=1)  # X[B, D] = AllGather_tp(Y[B, D_tp])
            x = gelu(x @ w + b)  # Y[B, F_tp] = X[B, D] @ W[D, F_tp]
        return all_reduce(squared_error(x, batch), AXIS)  # L = AllReduce_tp(L{U_tp})

    return per_rank(params, batch)


def loss_and_grads(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> tuple[Array, list[Layer]]:
    """The loss, and the gradients of a rank's columns. The reduce_scatters are the transposes of the gathers."""
    return jax.value_and_grad(loss)(params, batch, mesh, run)
