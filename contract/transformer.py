"""The second problem: pre-norm transformer blocks on given inputs, with the mean squared error.

A block is two layers, each with a residual: x = x + attention(norm(x)), then x = x + mlp(norm(x)), or experts in place
of the MLP. There are no embeddings, no biases and no dropout. `contract.blocks` has the mathematics and its backward
pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import numpy as np

from contract.problem import Batch, Problem


class Attention(NamedTuple):
    """gain[D] of the norm, q, k, v[D, H K] and o[H K, D]. Head h has the columns h K to (h + 1) K, and H K = D."""

    gain: Any
    q: Any
    k: Any
    v: Any
    o: Any


class Mlp(NamedTuple):
    """gain[D] of the norm, up[D, F] and down[F, D]."""

    gain: Any
    up: Any
    down: Any


class Experts(NamedTuple):
    """gain[D] of the norm, router[D, E], and an MLP for each of E experts: up[E, D, F] and down[E, F, D]."""

    gain: Any
    router: Any
    up: Any
    down: Any


# The dim of each parameter that tensor parallel splits: heads in attention, features between up and down.
TENSOR_DIMS = {
    Attention: Attention(None, 1, 1, 1, 0),
    Mlp: Mlp(None, 1, 0),
    Experts: Experts(None, None, 2, 1),
}
EXPERT_DIMS = {  # the dim that expert parallel splits
    Attention: Attention(None, None, None, None, None),
    Mlp: Mlp(None, None, None),
    Experts: Experts(None, None, 0, 0),
}
EPSILON = 1e-6  # of the norm


@dataclass(frozen=True)
class Transformer(Problem):
    """Sizes of the blocks. layers: blocks. width: of the residual stream, D. ff: F; d_ff need not be 4 D.

    experts: E, or 0 for a plain MLP. Each token goes to the `top_k` experts with the largest softmax probability, with
    these probabilities, normalized to a sum of 1, as gates. An expert takes at most `capacity` tokens of a sequence,
    first choices before second ones, and in the order of the tokens; what exceeds that is dropped: its gate is 0.
    """

    batch: int = 8
    width: int = 128
    sequence: int = 32
    heads: int = 8
    ff: int = 512
    experts: int = 0
    top_k: int = 2
    capacity_factor: float = 1.0

    unit: ClassVar[int] = 2  # the two layers of a block stay together

    @property
    def depth(self) -> int:
        """The length of a list of parameters: attention and MLP of every block."""
        return 2 * self.layers

    @property
    def capacity(self) -> int:
        """The most tokens of one sequence that an expert takes (GShard, Lepikhin et al., 2006.16668, section 2.2)."""
        factor = Fraction(str(self.capacity_factor))  # 0.7 of 10 is 7, however floats round
        return max(1, int(min(self.sequence, factor * self.top_k * self.sequence / self.experts)))

    def shape(self, layer: int) -> Any:
        """The shapes of one layer's parameters: attention, and then the MLP or the experts, of every block."""
        d, f, e = self.width, self.ff, self.experts
        if layer % 2 == 0:
            return Attention((d,), (d, d), (d, d), (d, d), (d, d))
        return Experts((d,), (d, e), (e, d, f), (e, f, d)) if e else Mlp((d,), (d, f), (f, d))

    def parameters(self) -> list[Any]:
        """The full model in float64. A matrix is N(0, 1 / rows); gains are not 1, so that a lost one shows."""
        rng = np.random.default_rng([self.seed, 0])

        def drawn(shape: tuple[int, ...]) -> np.ndarray:
            values = rng.standard_normal(shape)
            return 1 + 0.1 * values if len(shape) == 1 else values / np.sqrt(shape[-2])

        return [layer._make(map(drawn, layer)) for layer in self.shapes()]

    def data(self, step: int) -> Batch:
        """The global batch of a step in float64: x, y[B, S, D], weight[B, S, 1]. Every step has its own."""
        rng = np.random.default_rng([self.seed, 1, step])
        rows = (self.batch, self.sequence)
        x, y = rng.standard_normal((2, *rows, self.width))
        return Batch(x, y, np.full((*rows, 1), 1 / (self.batch * self.sequence * self.width)))

    def flaw(self) -> str | None:
        """Why there is no such transformer, in one line; None if there is."""
        for name in ("sequence", "heads", "ff", "top_k"):
            if (value := getattr(self, name)) < 1:
                return f"{name.replace('_', '-')} must be at least 1, got {value}"
        if self.width % self.heads:
            return f"heads must divide the width: width {self.width}, {self.heads} heads"
        if self.experts < 0:
            return f"experts must be at least 0, got {self.experts}"
        if self.experts and self.top_k > self.experts:
            return f"a token cannot go to {self.top_k} of {self.experts} experts"
        if not 0 < self.capacity_factor < float("inf"):
            return f"capacity-factor must be a number above 0, got {self.capacity_factor:g}"
        return None
