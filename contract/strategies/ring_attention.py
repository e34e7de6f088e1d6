"""Ring attention (Liu et al., 2310.01889): the sequence is split, and keys and values go around a ring.

Forward: n - 1 permutes of K and V, 2 B S / n D e bytes each, in every attention. Backward: the same again, and n
permutes of dK and dV, as large, which go around with them and come home. A rank has two pieces of the sequence, an
early and a late one, so that causal attention is as much work for every rank (zigzag). The parameters are replicated:
all_reduce of every gradient, once per step. In JAX, K and V are permuted each by itself and kept, and their gradients
go back the way they came, in n - 1 permutes: so a transposed program does it.
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

Turns = tuple[str, tuple[tuple[int, int], ...], int]  # what goes around, along which edges, and how often


def refusal(asked: Asked, n: int) -> str | None:
    """What must divide evenly."""
    return uneven_sequence("ring_attention", asked, 2 * n)


def rows(total: int, n: int) -> list[int]:
    """Every rank has a part of every sample."""
    return [total] * n


def cut(parts: Sequence[Part], problem: Problem, n: int, index: int, unit: int) -> list[Part]:
    """Nothing is cut: every rank holds a replica."""
    return list(parts)


def communication(share: Share, n: int) -> Iterator[Sent]:
    """What attention needs of other parts of the sequence; the loss; every gradient."""
    there = tuple((rank, (rank + 1) % n) for rank in range(n))
    back = tuple((b, a) for a, b in there)
    together = share.implementation == "torch"
    once: list[Turns] = [("k and v", there, n - 1)] if together else [(name, there, n - 1) for name in "kv"]
    home: list[Turns] = [(f"gradient of {name}", back, n - 1) for name in "kv"]
    if together:
        home = [*once, ("gradient of k and v", there, n)]
    tick = 0
    for phase, turns in (("forward", once), ("backward", home)):
        for one in share.passes:
            for part in attentions(share, one):
                size = heads_of(share, one, part) * (2 if together else 1)
                for name, edges, times in turns:
                    for _ in range(times):
                        detail, again = f"{name} of layer {part.layer}", phase == "forward"
                        yield Sent("collective_permute", size, phase, detail, None, edges, tick, again=again)
                        tick += 1
    yield share.loss()
    for part in reversed(share.gradients):
        for name, elements in reversed(share.tensors(part)):
            yield Sent("all_reduce", elements, "backward", f"gradient of {name}")


def kept(tensors: Sequence[Kept], n: int) -> list[Kept]:
    """A rank keeps its tokens; of its probabilities the logarithms of their sums, and a wide output beside a narrow."""
    mine = split(tensors, ("sequence", "product_sequence", "attend_sequence", "keys"), n)
    scores, rest = ([t for t in mine if (t.role == "scores") == of_scores] for of_scores in (True, False))
    sums = [t._replace(role="", dims=t.dims[:2]) for t in scores if t.size >= 4]
    queries = [t for t in rest if t.role == "attended"][:1]
    return [*rest, *sums, *(queries[0]._replace(role="", size=4) for t in scores if t.size < 4)]
