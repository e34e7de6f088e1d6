"""Expert parallel over `ep`: samples and experts are split, and tokens travel to their experts and back.

No collective is written. What the experts are given is stated twice: split by samples, as it is made, and split by
experts, as it is used, so XLA must move from one to the other by all_to_all, E B C D e bytes for a rank's B samples
(Lepikhin et al., 2006.16668). Where the experts' side alone is stated, it gathers and reduce_scatters instead.
"""

from __future__ import annotations

AXIS = "ep"
RULES = {
    "expert": AXIS,  # a rank's experts: up[E_ep, D, F], down[E_ep, F, D]
    "batch": AXIS,  # a rank's samples: X[B_ep, S, D], Y[B_ep, S, D]
    "experts": AXIS,
}
ACTIVATIONS = True  # the activations' sharding is stated
NAIVE = ("experts",)  # in the naive spelling that of what the experts are given and give, split by experts
