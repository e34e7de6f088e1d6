"""Data parallel: the batch split by samples over `dp`, every rank with the whole model (Li et al., 2006.15704).

Forward: every rank's loss is its samples' share of the mean over all samples, and one psum adds them. Backward,
derived: the parameters are replicated and used differently by every rank, so their gradients are all_reduced,
L (D^2 + D) e bytes. It is the transpose of that use, and nobody writes it.
"""

from __future__ import annotations

from jax import Array
from jax.sharding import PartitionSpec as P

from contract.problem import Batch, Layer
from jax_impl.collectives import all_reduce, varying

AXIS = "dp"
BATCH_SPEC = Batch(P(AXIS), P(AXIS), P(AXIS))  # a rank's samples: X[B_dp, D], Y[B_dp, D]


def weights(layer: Layer) -> Layer:
    """Every rank has W[D, F] and b[F] whole. Backward, derived: dW[D, F] = AllReduce_dp(dW[D, F]{U_dp})."""
    return Layer(*(varying(p, AXIS) for p in layer))


def total(share: Array) -> Array:
    """L = AllReduce_dp(L{U_dp})."""
    return all_reduce(share, AXIS)
