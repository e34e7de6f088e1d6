"""Tensor parallel: every W and b is split by columns, and activations are gathered between layers.

Forward: all_gather, B D e bytes L - 1 times. Backward: reduce_scatter, as many. It is L - 1 and not L, because the loss
is taken on the shards and the first layer's input needs no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract.kept import Kept, split
from contract.problem import Layer, Problem
from contract.share import HELD, Asked, Part, Sent, Share, narrow_dims
from contract.transformer import Transformer

AXIS = "tp"
UNIT = 1
DEPTH = 2
SPLITS = HELD


def refusal(asked: Asked, n: int) -> str | None:
    """The columns must divide evenly."""
    if isinstance(asked.problem, Transformer):
        return "tensor_parallel splits every layer by columns; in a transformer, use megatron_tensor_parallel"
    if asked.problem.width % n:
        return f"tensor_parallel needs a width divisible by its degree: width {asked.problem.width}, degree {n}"
    return None


def rows(total: int, n: int) -> list[int]:
    """Every rank has the whole batch."""
    return [total] * n


def cut(parts: Sequence[Part], problem: Problem, n: int, index: int, unit: int) -> list[Part]:
    """A rank's columns: W[D, F_tp], b[F_tp]."""

    return narrow_dims(parts, problem, {Layer: Layer(1, 0)}, n, index)


def communication(share: Share, n: int) -> Iterator[Sent]:
    """An all_gather of every layer's input that is split, the reduce_scatter of its gradient, and the loss."""
    width = share.problem.width
    for one in share.passes:
        for i, part in enumerate(share.parts_of(one)):
            if i or one.input_split:
                yield Sent("all_gather", one.rows * width, "forward", f"input of layer {part.layer}")
    for one in share.passes:
        for i, part in reversed(list(enumerate(share.parts_of(one)))):
            if i or one.input_grad:
                yield Sent(
                    "reduce_scatter", one.rows * width, "backward", f"gradient of the input of layer {part.layer}"
                )
    yield share.loss()


def kept(tensors: Sequence[Kept], n: int) -> list[Kept]:
    """Inputs are gathered, so they are whole. Pre-activations and the loss's residual are split."""
    return split(tensors, ("up_out", "down_out", "features"), n)
