"""Fully sharded data parallel, or ZeRO-3 (Rajbhandari et al., 1910.02054; Zhao et al., 2304.11277).

The batch is split by samples, and so are the rows of every parameter, its gradient and its optimizer state. Forward:
all_gather of every layer before it is used, L (D^2 + D) e bytes in total. Backward: reduce_scatter of every gradient,
as many bytes, once per step; and, unless the gathered layers are kept, all_gather of every w but the first layer's,
whose input needs no gradient. In torch w and b of a layer are otherwise sent together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract.kept import Kept
from contract.problem import Problem, split_sizes
from contract.share import HELD, Asked, Part, Sent, Share, narrow_rows, uneven_rows

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
    """Every layer gathered before each use; the loss; every gradient reduce_scattered. `share` has shards."""
    for part in share.parts:
        for name, elements in share.messages(part):
            yield Sent("all_gather", n * elements, "forward", name, again=share.schedule is None)
    yield share.loss()
    for i, part in reversed(list(enumerate(share.parts))):
        for name, elements in share.used_backward(part, first=not i) if share.gathered_again else ():
            yield Sent("all_gather", n * elements, "backward", name)
        for name, elements in share.messages(part):
            yield Sent("reduce_scatter", n * elements, "backward", f"gradient of {name}")


def kept(tensors: Sequence[Kept], n: int) -> list[Kept]:
    """For each of its rows a rank keeps what a single device keeps."""
    return list(tensors)
