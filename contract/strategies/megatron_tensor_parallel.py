"""Megatron's tensor parallel (Shoeybi et al., 1909.08053): even layers are split by columns, odd ones by rows.

Forward: all_reduce, B D e bytes for each of L / 2 pairs. Backward: all_reduce, L / 2 - 1 times, because the first
pair's input needs no gradient. The output is replicated, so the loss needs no sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract.problem import Problem
from contract.share import HELD, Asked, Kept, Part, Sent, Share, narrow

AXIS = "tp"
UNIT = 2
DEPTH = 2
SPLITS = HELD


def refusal(asked: Asked, n: int) -> str | None:
    """Columns and rows must divide evenly, and layers come in pairs."""
    problem, name = asked.problem, "megatron_tensor_parallel"
    if problem.width % n:
        return f"{name} needs a width divisible by its degree: width {problem.width}, degree {n}"
    if problem.layers % 2:
        return f"{name} splits layers in pairs and needs an even number, got {problem.layers}"
    return None


def rows(total: int, n: int) -> list[int]:
    """Every rank has the whole batch."""
    return [total] * n


def cut(parts: Sequence[Part], problem: Problem, n: int, index: int, unit: int) -> list[Part]:
    """Even layers: W[D, F_tp], b[F_tp]. Odd layers: W[F_tp, D], and the whole b[D]."""

    def mine(of: slice) -> slice:
        return narrow(of, problem.width, n, index)

    return [
        Part(layer, (mine(w[0]), w[1]), b) if layer % 2 else Part(layer, (w[0], mine(w[1])), (mine(b[0]),))
        for layer, w, b in parts
    ]


def communication(share: Share, n: int) -> Iterator[Sent]:
    """One all_reduce after every pair (g), and one before every pair whose input needs a gradient (f)."""
    width = share.problem.width
    for one in share.passes:
        for part in share.parts_of(one)[::2]:
            yield Sent("all_reduce", one.rows * width, "forward", f"output of layer {part.layer + 1}")
    for one in share.passes:
        for i, part in reversed(list(enumerate(share.parts_of(one)[::2]))):
            if i or one.input_grad:
                yield Sent("all_reduce", one.rows * width, "backward", f"gradient of the input of layer {part.layer}")


def kept(layers: Sequence[Kept], residual: float, n: int) -> tuple[list[Kept], float]:
    """The first pre-activation of a pair and the activation within it are split. Everything else is whole."""
    return [
        Kept(layer.input / n, layer.preactivation) if i % 2 else Kept(layer.input, layer.preactivation / n)
        for i, layer in enumerate(layers)
    ], residual
