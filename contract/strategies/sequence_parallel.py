"""Tensor parallel whose residual stream is split by the sequence (Korthikanti et al., 2205.05198).

Forward: all_gather before every layer and reduce_scatter after it, B S D e bytes each, two of each for every block.
Backward: their transposes, as many. Every gain's gradient is summed, D e bytes, and a router's, D E e bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract.problem import Problem
from contract.share import HELD, Asked, Kept, Part, Sent, Share, attentions, narrow_dims, uneven_heads
from contract.transformer import TENSOR_DIMS

AXIS = "tp"
UNIT = 2
DEPTH = 2
SPLITS = HELD


def refusal(asked: Asked, n: int) -> str | None:
    """Heads, features and the sequence must divide evenly."""
    if flaw := uneven_heads("sequence_parallel", asked.problem, n):
        return flaw
    if asked.sequence % n:
        return f"sequence_parallel needs a sequence divisible by its degree: {asked.sequence} tokens, degree {n}"
    return None


def rows(total: int, n: int) -> list[int]:
    """Every rank has a part of every sample."""
    return [total] * n


def cut(parts: Sequence[Part], problem: Problem, n: int, index: int, unit: int) -> list[Part]:
    """q, k, v[D, (H K)_tp], o[(H K)_tp, D]; up[D, F_tp], down[F_tp, D]; gains and router are whole."""
    return narrow_dims(parts, problem, TENSOR_DIMS, n, index)


def communication(share: Share, n: int) -> Iterator[Sent]:
    """An all_gather and a reduce_scatter for every layer, each way; the loss; gradients of what a rank uses in part."""
    for phase in ("forward", "backward"):
        for one in share.passes:
            for part in share.parts_of(one):
                yield Sent("all_gather", share.activation(one), phase, f"layer {part.layer}")
                yield Sent("reduce_scatter", share.activation(one), phase, f"layer {part.layer}")
    for one in share.passes if share.run_again else ():
        for part in attentions(share, one):
            for op, layer in (
                ("all_gather", part.layer),
                ("reduce_scatter", part.layer),
                ("all_gather", part.layer + 1),
            ):
                yield Sent(op, share.activation(one), "backward", f"layer {layer}, again")
    yield share.loss()
    for part in reversed(share.used):
        for name, elements in share.tensors(part):
            if name.startswith(("gain", "router")):
                yield Sent("all_reduce", elements, "backward", f"gradient of {name}")


def kept(layers: Sequence[Kept], residual: float, n: int) -> tuple[list[Kept], float]:
    """A rank keeps its heads, its features, and its part of the residual stream; the input of a product is whole."""
    return [Kept(layer.input / n, layer.preactivation / n) for layer in layers], residual / n
