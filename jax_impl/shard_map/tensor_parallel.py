"""Tensor parallel: every W and b is split by columns over `tp`, and activations are gathered between layers.

Forward: all_gather of the activations before every layer but the first. Backward, derived: reduce_scatter of their
gradients, its transpose. B D e bytes each, 2 (L - 1) times: the last layer's output stays split, because the loss can
be taken on the shards and summed by one scalar psum, and the first layer's input needs no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

from jax import Array
from jax.sharding import PartitionSpec as P

from contract.problem import Batch, Layer
from jax_impl.collectives import all_gather, all_reduce
from jax_impl.model import gelu

AXIS = "tp"
PARAMS_SPEC = {Layer: [Layer(P(None, AXIS), P(AXIS))]}  # a rank's columns: W[D, F_tp], b[F_tp]
BATCH_SPEC = Batch(P(), P(None, AXIS), P())  # every input, and the targets of a rank's columns: X[B, D], Y[B, F_tp]


def forward(params: Iterable[Layer], x: Array) -> Array:
    """All layers. Their output is split, X[B, D_tp], and so is an input that another stage has computed."""
    for w, b in params:
        if x.shape[1] < w.shape[0]:
            x = all_gather(x, AXIS, dim=1)  # X[B, D] = AllGather_tp(Y[B, D_tp])
        x = gelu(x @ w + b)  # Y[B, F_tp] = X[B, D] @ W[D, F_tp]
    return x


def total(share: Array) -> Array:
    """L = AllReduce_tp(L{U_tp})."""
    return all_reduce(share, AXIS)
