"""Megatron's tensor parallel (Shoeybi et al., 1909.08053): even layers are split by columns, odd ones by rows.

Forward: all_reduce, B D e bytes for each of L / 2 pairs. Backward: all_reduce, L / 2 - 1 times, because the first
pair's input needs no gradient. The output is replicated, so the loss needs no sum.

In a transformer the pair is within a layer, and the norm comes before it: all_reduce of B S D e bytes, one each way for
attention and one each way for the MLP of every block. The gradient of a router is summed, D E e bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract.kept import Kept, split
from contract.problem import Layer, Problem
from contract.share import HELD, Asked, Part, Sent, Share, narrow_dims, uneven_heads
from contract.transformer import TENSOR_DIMS, Attention, Transformer

AXIS = "tp"
UNIT = 2
DEPTH = 2
SPLITS = HELD


def refusal(asked: Asked, n: int) -> str | None:
    """Columns and rows must divide evenly, and layers come in pairs."""
    problem, name = asked.problem, "megatron_tensor_parallel"
    if isinstance(problem, Transformer):
        return uneven_heads(name, problem, n)
    if problem.width % n:
        return f"{name} needs a width divisible by its degree: width {problem.width}, degree {n}"
    if problem.layers % 2:
        return f"{name} splits layers in pairs and needs an even number, got {problem.layers}"
    return None


def rows(total: int, n: int) -> list[int]:
    """Every rank has the whole batch."""
    return [total] * n


def cut(parts: Sequence[Part], problem: Problem, n: int, index: int, unit: int) -> list[Part]:
    """Even layers: W[D, F_tp], b[F_tp]. Odd layers: W[F_tp, D], and the whole b[D]. In a block: heads and features."""
    if isinstance(problem, Transformer):
        return narrow_dims(parts, problem, TENSOR_DIMS, n, index)
    halves = [[part for part in parts if part.layer % 2 == odd] for odd in (0, 1)]
    dims = {Layer: Layer(1, 0)}, {Layer: Layer(0, None)}
    made = [part for half, of in zip(halves, dims, strict=True) for part in narrow_dims(half, problem, of, n, index)]
    by_layer = {part.layer: part for part in made}
    return [by_layer[part.layer] for part in parts]


def communication(share: Share, n: int) -> Iterator[Sent]:
    """One all_reduce after every pair (g), and one before every pair whose input needs a gradient (f)."""
    blocks = isinstance(share.problem, Transformer)
    each = 1 if blocks else 2
    for one in share.passes:
        for part in share.parts_of(one)[::each]:
            inner = isinstance(part.cuts, Attention)  # of a block, and not its last sum
            what = f"output of layer {part.layer + each - 1}"
            yield Sent("all_reduce", share.activation(one), "forward", what, again=inner)
    for one in share.passes:
        for i, part in reversed(list(enumerate(share.parts_of(one)[::each]))):
            if i or one.input_grad or blocks:
                yield Sent(
                    "all_reduce", share.activation(one), "backward", f"gradient of the input of layer {part.layer}"
                )
    for part in reversed(share.used):
        for name, elements in share.tensors(part):
            if name.startswith("router"):
                yield Sent("all_reduce", elements, "backward", f"gradient of {name}")


def kept(tensors: Sequence[Kept], n: int) -> list[Kept]:
    """What is within a pair is split: pre-activation and activation; in a block, heads and the features of its MLP."""
    return split(tensors, ("up_out", "down_in", "heads", "attend_heads"), n)
