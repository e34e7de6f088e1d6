"""Fully sharded data parallel, or ZeRO-3 (Rajbhandari et al., 1910.02054; Zhao et al., 2304.11277).

The batch is split by samples, and so are the rows of every parameter, its gradient and its optimizer state. A layer is
gathered before it is used: all_gather, L (D^2 + D) e bytes in total, in the forward pass and, unless it is kept, again
in the backward pass. In torch that is L - 1 times, because the first layer's input needs no gradient. Backward: reduce_scatter of every gradient, as many bytes, once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract.problem import Problem, split_sizes
from contract.share import HELD, Asked, Kept, Part, Sent, Share, narrow_rows, uneven_rows

AXIS = "fsdp"
UNIT = 1
DEPTH = 1
SPLITS = HELD


def refusal(asked: Asked, n: int) -> str | None:
    """The rows of every parameter must divide evenly, and every rank needs a sample."""
    return uneven_rows("fully_sharded", asked, n)


def rows(total: int, n: int) -> list[int]:
    """The samples are split as equally as possible."""
    return split_sizes(total, n)


def cut(parts: Sequence[Part], problem: Problem, n: int, index: int, unit: int) -> list[Part]:
    """A rank's rows: W[D_fsdp, F], b[F_fsdp]."""
    return narrow_rows(parts, problem, n, index)


def communication(share: Share, n: int) -> Iterator[Sent]:
    """The loss; every layer gathered before each use; every gradient reduce_scattered. `share` has shards."""
    yield share.loss()
    for part in share.parts:
        for name, elements in share.messages(part):
            yield Sent("all_gather", n * elements, "forward", name)
    every = share.implementation != "torch" or share.passes[0].input_grad
    for i, part in reversed(list(enumerate(share.parts))):
        for name, elements in share.messages(part):
            if share.gathered_again and (i or every):
                yield Sent("all_gather", n * elements, "backward", name)
            yield Sent("reduce_scatter", n * elements, "backward", f"gradient of {name}")


def kept(layers: Sequence[Kept], residual: float, n: int) -> tuple[list[Kept], float]:
    """For each of its rows a rank keeps what a single device keeps."""
    return list(layers), residual
