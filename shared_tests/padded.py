"""A transformer on samples of different lengths, as a batch of text has them. Ranks import it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from contract.problem import Batch
from contract.transformer import Transformer


@dataclass(frozen=True)
class Padded(Transformer):
    """Sample i ends after `lengths[i]` tokens. What follows only pads it: its weight is 0, and its target is absurd."""

    lengths: tuple[int, ...] = ()

    def data(self, step: int) -> Batch:
        x, y, _ = super().data(step)
        there = np.arange(self.sequence)[:, None] < np.array(self.lengths)[:, None, None]  # [B, S, 1]
        return Batch(x, np.where(there, y, 1e3), there / (sum(self.lengths) * self.width))
