"""Tensor parallel whose residual stream is split by the sequence, over `tp` (Korthikanti et al., 2205.05198).

No collective is written. The output of a layer is a sum over ranks, Y[B, S, D]{U_tp}, of which each needs its part of
the sequence, so XLA must reduce_scatter it, or all_reduce and slice, B S D e bytes; and it must gather the normalized
input of the next layer, if it is told that heads and features stay split: without that it may gather weights instead.
"""

from __future__ import annotations

AXIS = "tp"
RULES = {
    "qkv_out": AXIS,  # q, k, v[D, (H K)_tp], o[(H K)_tp, D]; up[D, F_tp], down[F_tp, D]; gains and router are whole
    "o_in": AXIS,
    "up_out": AXIS,
    "down_in": AXIS,
    "expert_up_out": AXIS,
    "expert_down_in": AXIS,
    "sequence": AXIS,  # a rank's part of the sequence: X[B, S_tp, D], Y[B, S_tp, D]
    "heads": AXIS,
    "attend_heads": AXIS,
}
ACTIVATIONS = True  # the activations' sharding is stated
NAIVE = ("sequence",)  # in the naive spelling that of the residual stream alone
