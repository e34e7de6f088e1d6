"""Data parallel: the batch is split by samples over `dp`, and every rank holds the whole model (Li et al., 2006.15704).

No collective is written. The loss is a sum over all samples, and so is a gradient, X^T[D, B_dp] @ dY[B_dp, F], which
contracts the split dim B. XLA must all_reduce both: L (D^2 + D) e bytes and a scalar.
"""

from __future__ import annotations

AXIS = "dp"
RULES = {"batch": AXIS, "batch_of_experts": AXIS}  # a rank's samples: X[B_dp, D], Y[B_dp, D]
