"""Ring attention (Liu et al., 2310.01889): the sequence is split, and keys and values go around a ring.

Forward: n - 1 permutes of K and V, 2 B S / n D e bytes each, in every attention. Backward: the same again, and n
permutes of dK and dV, as large, which go around with them and come home. A rank has two pieces of the sequence, an
early and a late one, so that causal attention is as much work for every rank (zigzag). The parameters are replicated:
all_reduce of every gradient, once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract.problem import Problem
from contract.share import Asked, Kept, Part, Sent, Share, attentions, heads_of, runs, uneven_sequence

AXIS = "cp"
UNIT = 2
DEPTH = 0
SPLITS = ()


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
    ring = tuple((rank, (rank + 1) % n) for rank in range(n))
    tick = 0
    for phase, again in (*runs(share), ("backward", False)):
        for one in share.passes:
            for part in attentions(share, one):
                size = heads_of(share, one, part)
                turns = [("k and v", n - 1), *([("dk and dv", n)] if phase == "backward" and not again else [])]
                for name, times in turns:
                    for _ in range(times):
                        detail = f"{name} of layer {part.layer}"
                        yield Sent("collective_permute", 2 * size, phase, detail, edges=ring, tick=tick)
                        tick += 1
    yield share.loss()
    for part in reversed(share.gradients):
        for name, elements in reversed(share.tensors(part)):
            yield Sent("all_reduce", elements, "backward", f"gradient of {name}")


def kept(layers: Sequence[Kept], residual: float, n: int) -> tuple[list[Kept], float]:
    """For each of its tokens a rank keeps what a single device keeps."""
    return [Kept(layer.input / n, layer.preactivation / n) for layer in layers], residual / n
