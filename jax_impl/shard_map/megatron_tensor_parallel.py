"""Megatron's tensor parallel (Shoeybi et al., 1909.08053): even layers split by columns, odd ones by rows, over `tp`.

The columns of an even W produce exactly those activations that the rows of the next W need, so nothing is communicated
within a pair of layers. Forward: one all_reduce after every pair (g). Backward, derived: one before every pair, the
transpose of `varying` (f), except the first, whose input needs no gradient. B D e bytes each, L - 1 times.

In a transformer the pair is within a layer: q, k, v and o, with a rank's heads, or up and down. f comes after the norm,
so there is no exception, and 4 all_reduces of B S D e bytes in each block. Every rank routes all tokens, but gets only
its part of the gradient of the gates, so the router's gradient is summed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax import Array
from jax.sharding import PartitionSpec as P

from contract.problem import Layer
from contract.transformer import TENSOR_DIMS, Experts
from jax_impl.collectives import all_reduce, varying
from jax_impl.model import gelu
from jax_impl.specs import split_dims

AXIS = "tp"
COLUMNS, ROWS = Layer(P(None, AXIS), P(AXIS)), Layer(P(AXIS), P())
# Even layers: W[D, F_tp], b[F_tp]. Odd layers: W[F_tp, D], and the whole b[D].
# In a block: q, k, v[D, (H K)_tp], o[(H K)_tp, D]; up[D, F_tp], down[F_tp, D]; everything else is whole.
PARAMS_SPEC = {Layer: [COLUMNS, ROWS], **split_dims(TENSOR_DIMS, AXIS)}


def weights(layer: Any) -> Any:
    """Backward, derived: drouter[D, E] = AllReduce_tp(drouter[D, E]{U_tp}). Everything else is used as it is."""
    return layer._replace(router=varying(layer.router, AXIS)) if isinstance(layer, Experts) else layer


def forward(params: Iterable[Layer], x: Array) -> Array:
    """The layers in pairs. Input and output are whole on every rank: X[B, D]."""
    layers = iter(params)
    for (w_up, b_up), (w_down, b_down) in zip(layers, layers, strict=True):
        h = gelu(enter(x) @ w_up + b_up)  # H[B, F_tp] = X[B, D] @ W[D, F_tp]
        y = leave(h @ w_down)  # Y[B, D]{U_tp} = H[B, F_tp] @ W[F_tp, D]
        x = gelu(y + b_down)  # the bias is added once, after the sum
    return x


def enter(x: Array) -> Array:
    """f: X is whole on every rank. Backward, derived: dX = AllReduce_tp(dX{U_tp})."""
    return varying(x, AXIS)


def leave(y: Array) -> Array:
    """g: Y = AllReduce_tp(Y{U_tp}). Backward: dY is whole on every rank."""
    return all_reduce(y, AXIS)
