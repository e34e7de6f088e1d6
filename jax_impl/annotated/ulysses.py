"""Ulysses over `cp`: the sequence is split, but in attention the heads are (Jacobs et al., 2309.14509).

No collective is written. Q, K, V and the output of attention are stated to be split by heads, and everything around
them by the sequence, so XLA must move from one to the other by all_to_all, B S / n D e bytes each.
"""

from __future__ import annotations

AXIS = "cp"
RULES = {
    "product_sequence": AXIS,  # a rank's part of the sequence: X[B, S_cp, D], Y[B, S_cp, D]
    "attend_heads": AXIS,  # Q, K, V[B, S, H_cp, K], O[B, S, H_cp, K]
}
ACTIVATIONS = True  # the activations' sharding is stated
