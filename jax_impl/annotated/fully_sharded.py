"""Fully sharded data parallel, or ZeRO-3: samples and the rows of every parameter are split over `fsdp`.

No collective is written. A layer contracts a dim that is split in W alone, Y[B_fsdp, F] = X[B_fsdp, D] @ W[D_fsdp, F],
so XLA must gather W, if it is told that Y stays split by samples and that W is whole over `fsdp` where it is used.
Without that it resolves the conflict by size: it reshards activations by all_to_all, computes in parts of F, or gathers
W over other axes as well (Rajbhandari et al., 1910.02054; Xu et al., 2105.04663).
"""

from __future__ import annotations

import jax

AXIS = "fsdp"
RULES = {
    "batch": AXIS,  # a rank's samples: X[B_fsdp, D], Y[B_fsdp, D]
    "up_in": AXIS,  # a rank's rows: W[D_fsdp, F], b[F_fsdp]
    "down_in": AXIS,
    "up_bias": AXIS,
    "down_bias": AXIS,
    "batch_of_experts": AXIS,  # the same of a block
    "gain": AXIS,
    "qkv_in": AXIS,
    "o_in": AXIS,
    "router_in": AXIS,
    "expert": AXIS,
}
ACTIVATIONS = True  # the activations' sharding is stated
WHOLE = True  # and so is that a matrix is whole over this axis where it is used
kept = jax.checkpoint_policies.everything_saveable  # parameters are inputs of a layer, which are not saved
