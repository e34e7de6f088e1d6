"""Tensor parallel: every W and b is split by columns over `tp`, and activations are gathered between layers.

No collective is written. A layer's output is split by columns, Y[B, F_tp] = X[B, D] @ W[D, F_tp], and the next layer
contracts that dim with the whole rows of its W, so XLA must gather it, B D e bytes. The gradient of the gathered input
is a sum over ranks, which XLA may reduce_scatter, or all_reduce and slice.
"""

from __future__ import annotations

AXIS = "tp"
RULES = {
    "up_out": AXIS,  # a rank's columns: W[D, F_tp], b[F_tp]
    "up_bias": AXIS,
    "down_out": AXIS,
    "down_bias": AXIS,
    "features": AXIS,  # every input, and the targets of a rank's columns: X[B, D], Y[B, F_tp]
}
