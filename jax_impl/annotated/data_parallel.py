"""Data parallel: the batch split by samples over `dp`, every rank with the whole model (Li et al., 2006.15704).

No collective is written. The loss is a sum over all samples and a gradient is too, X^T[D, B_dp] @ dY[B_dp, F] with B
contracted and split: XLA has to all_reduce both, L (D^2 + D) e bytes and a scalar.
"""

from __future__ import annotations

AXIS = "dp"
RULES = {"batch": AXIS}  # a rank's samples: X[B_dp, D], Y[B_dp, D]
