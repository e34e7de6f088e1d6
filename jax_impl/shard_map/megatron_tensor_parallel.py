"""Megatron's tensor parallel (Shoeybi et al., 1909.08053): even layers split by columns, odd ones by rows, over `tp`.

The columns of an even W produce exactly those activations that the rows of the next W need, so nothing is communicated
within a pair of layers. Forward: one all_reduce after every pair (g). Backward, derived: one before every pair, the
transpose of `varying` (f), except the first, whose input needs no gradient. B D e bytes each, L - 1 times.
"""

from __future__ import annotations

from collections.abc import Iterable

from jax import Array
from jax.sharding import PartitionSpec as P

from contract.problem import Layer
from jax_impl.collectives import all_reduce, varying
from jax_impl.model import gelu

AXIS = "tp"
COLUMNS, ROWS = Layer(P(None, AXIS), P(AXIS)), Layer(P(AXIS), P())
PARAMS_SPEC = [COLUMNS, ROWS]  # even layers: W[D, F_tp], b[F_tp]; odd layers: W[F_tp, D], and the whole b[D]


def forward(params: Iterable[Layer], x: Array) -> Array:
    """The layers in pairs. Input and output are whole on every rank: X[B, D]."""
    layers = iter(params)
    for (w_up, b_up), (w_down, b_down) in zip(layers, layers, strict=True):
        x = varying(x, AXIS)  # f
        h = gelu(x @ w_up + b_up)  # H[B, F_tp] = X[B, D] @ W[D, F_tp]
        y = all_reduce(h @ w_down, AXIS)  # g: Y[B, D] = AllReduce_tp(H[B, F_tp] @ W[F_tp, D]{U_tp})
        x = gelu(y + b_down)  # the bias is added once, after the sum
    return x
