"""Tensor parallel whose residual stream is split by the sequence (Korthikanti et al., 2205.05198).

Forward: all_gather before every layer and reduce_scatter after it, B S D e bytes each, two of each for every block.
Backward: their transposes, as many. Every gain's gradient is summed, D e bytes, and a router's, D E e bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract.kept import Kept, split
from contract.problem import Problem
from contract.share import HELD, Asked, Part, Sent, Share, narrow_dims, uneven_heads
from contract.transformer import TENSOR_DIMS, Attention

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
                ends = (
                    ("input", "output") if phase == "forward" else ("gradient of the output", "gradient of the input")
                )
                for op, what in zip(("all_gather", "reduce_scatter"), ends, strict=True):
                    again = phase == "forward" and (what == "input" or isinstance(part.cuts, Attention))
                    yield Sent(op, share.activation(one), phase, f"{what} of layer {part.layer}", again=again)
    yield share.loss()
    for part in reversed(share.used):
        for name, elements in share.tensors(part):
            if name.startswith(("gain", "router")):
                yield Sent("all_reduce", elements, "backward", f"gradient of {name}")


def kept(tensors: Sequence[Kept], n: int) -> list[Kept]:
    """A rank keeps its heads, its features, and its part of the residual stream; the input of a product is whole."""
    return split(tensors, ("sequence", "heads", "attend_heads", "up_out"), n)
