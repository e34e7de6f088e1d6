"""A transformer whose routers prefer some experts, and how many tokens come to each."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from contract.problem import Batch
from contract.transformer import Experts, Transformer

OURS, DROPPING, SPARSE = "torch", "torch, capacity factor 1", "all_to_all"  # the contestants
BIAS = 4.0  # feature 0 of every input: large enough to stay about the same through the blocks


@dataclass(frozen=True)
class Skewed(Transformer):
    """skew: expert e is chosen about as often as (1 + e)^-skew says, in every block. 0: all alike.

    The routers have no bias. Instead, feature 0 of every input is the same, and the routers' weights of it differ.
    """

    skew: float = 0.0

    def parameters(self) -> list[Any]:
        """Those of a transformer, with that row of the routers."""
        layers = super().parameters()
        preference = -self.skew * np.log1p(np.arange(max(self.experts, 1))) / BIAS
        for i, layer in enumerate(layers):
            if isinstance(layer, Experts):
                router = layer.router.copy()
                router[0] = preference * np.sqrt(1 + BIAS**2 / self.width) / layer.gain[0]
                layers[i] = layer._replace(router=router)
        return layers

    def data(self, step: int) -> Batch:
        """Those of a transformer, with that feature."""
        batch = super().data(step)
        x = batch.x.copy()
        x[..., 0] = BIAS
        return batch._replace(x=x)


def skewed(problem: Transformer, skew: float, capacity: int) -> Skewed:
    """The same sizes, with experts that take `capacity` tokens of a sequence."""
    sizes: dict[str, Any] = {field.name: getattr(problem, field.name) for field in fields(Transformer)}
    choices = problem.top_k * problem.sequence
    sizes["capacity_factor"] = (capacity + 0.5) * problem.experts / choices  # rounded down to `capacity`
    return Skewed(**sizes, skew=skew)
