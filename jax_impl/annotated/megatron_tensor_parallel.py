"""Megatron's tensor parallel (Shoeybi et al., 1909.08053): even layers split by columns, odd ones by rows, over `tp`.

No collective is written. An odd layer contracts a dim that is split in both factors, Y[B, D]{U_tp} = H[B, F_tp] @
W[F_tp, D], so XLA must all_reduce its output, B D e bytes for each pair, and in the backward pass the gradient of the
input of each pair except the first. In a transformer the pair is within a layer: q, k, v and o, or up and down. q, k
and v are one product, because of three some compilers sum the gradients one by one.
"""

from __future__ import annotations

AXIS = "tp"
RULES = {
    "up_out": AXIS,  # even layers: W[D, F_tp], b[F_tp]
    "up_bias": AXIS,
    "down_in": AXIS,  # odd layers: W[F_tp, D], and the whole b[D]
    "qkv_out": AXIS,  # of a block: q, k, v[D, (H K)_tp], o[(H K)_tp, D]; up[D, F_tp], down[F_tp, D]
    "o_in": AXIS,
    "expert_up_out": AXIS,
    "expert_down_in": AXIS,
    "heads": AXIS,
    "attend_heads": AXIS,
}
FUSED = True  # q, k and v of a block are one product: of three, some compilers sum the gradients one by one
