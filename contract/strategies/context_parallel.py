"""Context parallel: the sequence is split, and every rank gathers keys and values (Llama 3, 2407.21783, section 3.3.2).

Forward: all_gather of K and of V, B S D e bytes each, in every attention. Backward: reduce_scatter of their gradients,
as many. The parameters are replicated: all_reduce of every gradient, once per step.
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
    return uneven_sequence("context_parallel", asked, n)


def rows(total: int, n: int) -> list[int]:
    """Every rank has a part of every sample."""
    return [total] * n


def cut(parts: Sequence[Part], problem: Problem, n: int, index: int, unit: int) -> list[Part]:
    """Nothing is cut: every rank holds a replica."""
    return list(parts)


def communication(share: Share, n: int) -> Iterator[Sent]:
    """What attention needs of other parts of the sequence; the loss; every gradient."""
    for phase, op in (("forward", "all_gather"), ("backward", "reduce_scatter")):
        for one in share.passes:
            for part in attentions(share, one):
                for name in "kv":
                    what = name if phase == "forward" else f"gradient of {name}"
                    size, again = n * heads_of(share, one, part), phase == "forward"
                    yield Sent(op, size, phase, f"{what} of layer {part.layer}", again=again)
    yield share.loss()
    for part in reversed(share.gradients):
        for name, elements in reversed(share.tensors(part)):
            yield Sent("all_reduce", elements, "backward", f"gradient of {name}")


def kept(tensors: Sequence[Kept], n: int) -> list[Kept]:
    """For each of its tokens a rank keeps what a single device keeps, but the keys and values of all tokens."""
    return split(tensors, ("sequence", "product_sequence", "attend_sequence"), n)
