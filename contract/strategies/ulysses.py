"""Ulysses (Jacobs et al., 2309.14509): the sequence is split, but in attention the heads are.

Forward: all_to_all of Q, K, V and of the output, B S / n D e bytes each, in every attention: between a part of the
sequence for all heads, and the whole sequence for a part of the heads. Backward: the same four. The parameters are
replicated: all_reduce of every gradient, once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract.kept import Kept, split
from contract.problem import Problem
from contract.share import Asked, Part, Sent, Share, attentions, heads_of, uneven_sequence

AXIS = "cp"
UNIT = 2
DEPTH = 0
SPLITS = ()


def refusal(asked: Asked, n: int) -> str | None:
    """What must divide evenly."""
    if flaw := uneven_sequence("ulysses", asked, n):
        return flaw
    if asked.heads % n:
        return f"ulysses needs heads that its degree divides: {asked.heads} on every rank, degree {n}"
    return None


def rows(total: int, n: int) -> list[int]:
    """Every rank has a part of every sample."""
    return [total] * n


def cut(parts: Sequence[Part], problem: Problem, n: int, index: int, unit: int) -> list[Part]:
    """Nothing is cut: every rank holds a replica."""
    return list(parts)


def communication(share: Share, n: int) -> Iterator[Sent]:
    """What attention needs of other parts of the sequence; the loss; every gradient."""
    for phase in ("forward", "backward"):
        for one in share.passes:
            for part in attentions(share, one):
                for name in "qkvo":
                    what = name if phase == "forward" else f"gradient of {name}"
                    size, again = heads_of(share, one, part), phase == "forward"
                    yield Sent("all_to_all", size, phase, f"{what} of layer {part.layer}", again=again)
    yield share.loss()
    for part in reversed(share.gradients):
        for name, elements in reversed(share.tensors(part)):
            yield Sent("all_reduce", elements, "backward", f"gradient of {name}")


def kept(tensors: Sequence[Kept], n: int) -> list[Kept]:
    """A rank keeps its tokens, and in attention its heads of all tokens."""
    return split(tensors, ("sequence", "product_sequence", "attend_heads"), n)
