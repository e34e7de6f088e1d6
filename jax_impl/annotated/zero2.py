"""ZeRO-2: data parallel over `fsdp` whose gradients and optimizer state are split by the rows of the parameters.

No collective is written. The sharding of the gradients and of the state is stated. A gradient is a sum over ranks of
which each rank needs its rows, which XLA may reduce_scatter, or all_reduce and slice. A rank can update only its rows,
so XLA must gather the updated ones, L (D^2 + D) e bytes (Xu et al., 2004.13336).
"""

from __future__ import annotations

AXIS = "fsdp"
RULES = {"batch": AXIS, "batch_of_experts": AXIS}  # a rank's samples: X[B_fsdp, D], Y[B_fsdp, D]
GRADS_RULES = {  # a rank's rows: dW[D_fsdp, F] of W[D, F], db[F_fsdp] of b[F]; so is the state
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
