"""Fully sharded data parallel, or ZeRO-3: samples and the rows of every parameter are split over `fsdp`.

Forward: a layer is gathered before it is used, L (D^2 + D) e bytes in total. Backward, derived: reduce_scatter of every
gradient, as many bytes; and, unless the gathered layers are kept, all_gather of every w but the first layer's, whose
input needs no gradient (Rajbhandari et al., 1910.02054; Zhao et al., 2304.11277).
"""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.sharding import PartitionSpec as P

from contract.problem import Batch
from jax_impl.collectives import all_gather, all_reduce

AXIS = "fsdp"
PARAMS_SPEC = P(AXIS)  # a rank's rows: W[D_fsdp, F], b[F_fsdp]
BATCH_SPEC = Batch(P(AXIS), P(AXIS), P(AXIS))  # a rank's samples: X[B_fsdp, D], Y[B_fsdp, D]


def weights(layer: Any) -> Any:
    """W[D, F] = AllGather_fsdp(W[D_fsdp, F]).

    Backward, derived: dW[D_fsdp, F] = ReduceScatter_fsdp(dW[D, F]{U_fsdp}).
    """
    return layer._make(all_gather(p, AXIS) for p in layer)


def kept(primitive: Any, *arrays: Any, **params: Any) -> bool:
    """What is kept for the backward pass where a layer is gathered again: everything but gathered matrices."""
    return not (primitive.name == "all_gather" and AXIS in params["axis_name"] and arrays[0].ndim > 1)


def total(share: Array) -> Array:
    """L = AllReduce_fsdp(L{U_fsdp})."""
    return all_reduce(share, AXIS)
