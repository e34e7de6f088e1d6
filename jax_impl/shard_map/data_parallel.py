"""Data parallel: the batch is split by samples over `dp`, and every rank holds the whole model (Li et al., 2006.15704).

Forward: each rank's loss is its samples' share of the mean over all samples, and one psum adds the shares. Backward,
derived: all_reduce of every gradient, L (D^2 + D) e bytes. The parameters are replicated and every rank uses them
differently (`varying`); the transpose of that is the all_reduce.
"""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.sharding import PartitionSpec as P

from contract.problem import Batch
from jax_impl.collectives import all_reduce, varying

AXIS = "dp"
REPLICATED = True  # so gradients that another axis scatters are summed afterwards, instead of by `weights`
BATCH_SPEC = Batch(P(AXIS), P(AXIS), P(AXIS))  # a rank's samples: X[B_dp, D], Y[B_dp, D]


def weights(layer: Any) -> Any:
    """Every rank has W[D, F] and b[F] whole. Backward, derived: dW[D, F] = AllReduce_dp(dW[D, F]{U_dp})."""
    return layer._make(varying(p, AXIS) for p in layer)


def total(share: Array) -> Array:
    """L = AllReduce_dp(L{U_dp})."""
    return all_reduce(share, AXIS)
