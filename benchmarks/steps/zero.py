"""torch's ZeRO-1. Its import compiles optimizers by torch.jit for two seconds, and warns of that."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
