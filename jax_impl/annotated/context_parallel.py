"""Context parallel over `cp`: the sequence is split, and every rank gathers keys and values.

No collective is written. Attention contracts the keys' positions, which are split, with queries of which each rank
keeps its own, so XLA must gather K and V, B S D e bytes each (Llama 3, 2407.21783, section 3.3.2). It never derives a
ring, which would need less memory.
"""

from __future__ import annotations

AXIS = "cp"
RULES = {
    "product_sequence": AXIS,  # a rank's part of the sequence: X[B, S_cp, D], Y[B, S_cp, D]
    "attend_sequence": AXIS,
}
ACTIVATIONS = True  # the activations' sharding is stated
