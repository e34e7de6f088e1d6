"""Ulysses over `cp`: the sequence is split, but in attention the heads are (Jacobs et al., 2309.14509).

Forward: all_to_all of Q, K, V and of the output, B S / n D e bytes each, in every attention. Backward, derived: the
same four. The parameters are replicated: all_reduce of every gradient.
"""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.sharding import PartitionSpec as P

from contract.problem import Batch
from jax_impl.blocks import Local
from jax_impl.collectives import all_reduce, all_to_all_dims, varying

AXIS = "cp"
REPLICATED = True  # so gradients that another axis scatters are summed afterwards, instead of by `weights`
BATCH_SPEC = Batch(*[P(None, AXIS)] * 3)  # a rank's part of the sequence: X[B, S_cp, D], Y[B, S_cp, D]


def weights(layer: Any) -> Any:
    """Every rank has W[D, F] whole. Backward, derived: dW[D, F] = AllReduce_cp(dW[D, F]{U_cp})."""
    return layer._make(varying(p, AXIS) for p in layer)


def attend(q: Array, k: Array, v: Array, local: Local) -> Array:
    """Q, K, V[B, S, H_cp, K] = AllToAll_cp(Q, K, V[B, S_cp, H, K]); and back for O[B, S_cp, H, K]."""
    q, k, v = (all_to_all_dims(a, AXIS, split=2, concat=1) for a in (q, k, v))
    return all_to_all_dims(local(q, k, v), AXIS, split=1, concat=2)


def total(share: Array) -> Array:
    """L = AllReduce_cp(L{U_cp})."""
    return all_reduce(share, AXIS)
