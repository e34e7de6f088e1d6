"""ZeRO-1: data parallel over `fsdp` whose optimizer state is split by the rows of the parameters.

Backward, derived: all_reduce of every gradient, L (D^2 + D) e bytes. Update: each rank updates its rows of every
parameter, and the updated rows are gathered, as many bytes (Rajbhandari et al., 1910.02054, section 5.1).
"""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.sharding import PartitionSpec as P

from contract.problem import Batch
from jax_impl.collectives import all_gather, all_reduce, shard, varying

AXIS = "fsdp"
STATE_SPEC = P(AXIS)  # a rank's rows: M[D_fsdp, F] of W[D, F], m[F_fsdp] of b[F]
BATCH_SPEC = Batch(P(AXIS), P(AXIS), P(AXIS))  # a rank's samples: X[B_fsdp, D], Y[B_fsdp, D]


def weights(layer: Any) -> Any:
    """Every rank has W[D, F] and b[F] whole. Backward, derived: dW[D, F] = AllReduce_fsdp(dW[D, F]{U_fsdp})."""
    return layer._make(varying(p, AXIS) for p in layer)


def own(layer: Any) -> Any:
    """The rows that a rank updates: W[D_fsdp, F] of W[D, F], b[F_fsdp] of b[F], and so of their gradients."""
    return layer._make(shard(p, AXIS) for p in layer)


def whole(layer: Any) -> Any:
    """W[D, F] = AllGather_fsdp(W[D_fsdp, F])."""
    return layer._make(all_gather(p, AXIS) for p in layer)


def total(share: Array) -> Array:
    """L = AllReduce_fsdp(L{U_fsdp})."""
    return all_reduce(share, AXIS)
