"""Context parallel over `cp`: the sequence is split, and every rank gathers keys and values.

Forward: all_gather of K and of V, B S D e bytes each, in every attention. Backward, derived: reduce_scatter of their
gradients, as many (Llama 3, 2407.21783, section 3.3.2). The parameters are replicated: all_reduce of every gradient.
"""

from __future__ import annotations

from typing import Any

from jax import Array, lax
from jax.sharding import PartitionSpec as P

from contract.problem import Batch
from jax_impl.blocks import Local
from jax_impl.collectives import all_gather, all_reduce, varying

AXIS = "cp"
REPLICATED = True  # so gradients that another axis scatters are summed afterwards, instead of by `weights`
BATCH_SPEC = Batch(*[P(None, AXIS)] * 3)  # a rank's part of the sequence: X[B, S_cp, D], Y[B, S_cp, D]


def weights(layer: Any) -> Any:
    """Every rank has W[D, F] whole. Backward, derived: dW[D, F] = AllReduce_cp(dW[D, F]{U_cp})."""
    return layer._make(varying(p, AXIS) for p in layer)


def attend(q: Array, k: Array, v: Array, local: Local) -> Array:
    """Q[B, S_cp, H, K] attends to K, V[B, S, H, K] = AllGather_cp(K, V[B, S_cp, H, K])."""
    k, v = (all_gather(a, AXIS, dim=1) for a in (k, v))
    return local(q, k, v, lax.axis_index(AXIS) * q.shape[1])


def total(share: Array) -> Array:
    """L = AllReduce_cp(L{U_cp})."""
    return all_reduce(share, AXIS)
