"""ZeRO-1: data parallel over `fsdp` whose optimizer state is split by the rows of the parameters.

No collective is written. The state's sharding alone is stated. A rank can update only those rows whose state it has, so
XLA must gather the updated rows, L (D^2 + D) e bytes, and needs of the summed gradients only these rows: it may
all_reduce and slice them, or reduce_scatter them, which makes ZeRO-2 of it (Xu et al., 2004.13336).
"""

from __future__ import annotations

AXIS = "fsdp"
RULES = {"batch": AXIS, "batch_of_experts": AXIS}  # a rank's samples: X[B_fsdp, D], Y[B_fsdp, D]
STATE_RULES = {  # a rank's rows: M[D_fsdp, F] of W[D, F], m[F_fsdp] of b[F]
    "up_in": AXIS,
    "down_in": AXIS,
    "up_bias": AXIS,
    "down_bias": AXIS,
    "gain": AXIS,  # the same of a block
    "qkv_in": AXIS,
    "o_in": AXIS,
    "router_in": AXIS,
    "expert": AXIS,
}
