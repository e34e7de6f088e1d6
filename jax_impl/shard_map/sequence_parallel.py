"""Tensor parallel whose residual stream is split by the sequence, over `tp` (Korthikanti et al., 2205.05198).

Between the layers a rank has its part of the sequence, so norms and residuals are computed once and not on every rank.
Forward: all_gather before every layer, and reduce_scatter after it, in place of the all_reduce. Backward, derived:
their transposes. B S D e bytes each, so 4 of each in a block, as many bytes as tensor parallel sends. A gain is used on
a part of the sequence, so its gradient is summed, D e bytes.
"""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.sharding import PartitionSpec as P

from contract.problem import Batch
from contract.transformer import TENSOR_DIMS
from jax_impl.collectives import all_gather, all_reduce, reduce_scatter, varying
from jax_impl.specs import split_dims

AXIS = "tp"
PARAMS_SPEC = split_dims(TENSOR_DIMS, AXIS)  # q, k, v[D, (H K)_tp], o[(H K)_tp, D]; up[D, F_tp], down[F_tp, D]
BATCH_SPEC = Batch(*[P(None, AXIS)] * 3)  # a rank's part of the sequence: X[B, S_tp, D], Y[B, S_tp, D]


def weights(layer: Any) -> Any:
    """Backward, derived: dgain[D] = AllReduce_tp(dgain[D]{U_tp}), and so the router's. Others are used as they are."""
    summed = [name for name in ("gain", "router") if name in layer._fields]
    return layer._replace(**{name: varying(getattr(layer, name), AXIS) for name in summed})


def enter(x: Array) -> Array:
    """X[B, S, D] = AllGather_tp(X[B, S_tp, D]). Backward: dX[B, S_tp, D] = ReduceScatter_tp(dX[B, S, D]{U_tp})."""
    return all_gather(x, AXIS, dim=1)


def leave(y: Array) -> Array:
    """Y[B, S_tp, D] = ReduceScatter_tp(Y[B, S, D]{U_tp}). Backward: dY[B, S, D] = AllGather_tp(dY[B, S_tp, D])."""
    return reduce_scatter(y, AXIS, dim=1)


def total(share: Array) -> Array:
    """L = AllReduce_tp(L{U_tp})."""
    return all_reduce(share, AXIS)
