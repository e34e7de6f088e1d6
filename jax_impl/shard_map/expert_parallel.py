"""Expert parallel over `ep`: samples and experts are split, and tokens travel to their experts and back.

Forward: all_to_all before the experts and after them, E B C D e bytes each for a rank's B samples, with C slots of an
expert for every sample. Backward, derived: the same two (Lepikhin et al., 2006.16668). An expert's gradient is whole,
because all tokens that chose it came to it; everything else is replicated: all_reduce of its gradients.
"""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.sharding import PartitionSpec as P

from contract.problem import Batch
from contract.transformer import EXPERT_DIMS
from jax_impl.collectives import all_reduce, all_to_all_dims, varying
from jax_impl.specs import split_dims

AXIS = "ep"
PARAMS_SPEC = split_dims(EXPERT_DIMS, AXIS)  # a rank's experts: up[E_ep, D, F], down[E_ep, F, D]
BATCH_SPEC = Batch(P(AXIS), P(AXIS), P(AXIS))  # a rank's samples: X[B_ep, S, D], Y[B_ep, S, D]


def weights(layer: Any) -> Any:
    """Backward, derived: dW[D, F] = AllReduce_ep(dW[D, F]{U_ep}) of everything but the experts."""
    pairs = zip(layer, EXPERT_DIMS[type(layer)], strict=True)
    return layer._make(varying(p, AXIS) if dim is None else p for p, dim in pairs)


def dispatch(h: Array) -> Array:
    """H[E_ep, B C, D] = AllToAll_ep(H[E, B_ep C, D]): the slots of all ranks, for this rank's experts."""
    return all_to_all_dims(h, AXIS, split=0, concat=1)


def combine(h: Array) -> Array:
    """H[E, B_ep C, D] = AllToAll_ep(H[E_ep, B C, D]): what all experts made of this rank's slots."""
    return all_to_all_dims(h, AXIS, split=1, concat=0)


def total(share: Array) -> Array:
    """L = AllReduce_ep(L{U_ep})."""
    return all_reduce(share, AXIS)
