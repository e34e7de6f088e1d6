"""Data parallel (Li et al., 2006.15704): the batch is split by samples, and every rank holds the whole model.

Backward: all_reduce of every gradient, L (D^2 + D) e bytes in total, once per step whatever the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract.kept import Kept
from contract.problem import Problem, split_sizes
from contract.share import Asked, Part, Sent, Share

AXIS = "dp"
UNIT = 1
DEPTH = 0
SPLITS = ()


def refusal(asked: Asked, n: int) -> str | None:
    """Every rank needs a sample."""
    if asked.problem.batch < n:
        return f"data_parallel over {n} ranks needs a batch of at least {n}, got {asked.problem.batch}"
    return None


def rows(total: int, n: int) -> list[int]:
    """The samples are split as equally as possible."""
    return split_sizes(total, n)


def cut(parts: Sequence[Part], problem: Problem, n: int, index: int, unit: int) -> list[Part]:
    """Nothing is cut: every rank holds a replica."""
    return list(parts)


def communication(share: Share, n: int) -> Iterator[Sent]:
    """The loss, and every gradient from the last layer to the first, the bias before the weight."""
    yield share.loss()
    for part in reversed(share.gradients):
        for name, elements in reversed(share.tensors(part)):
            yield Sent("all_reduce", elements, "backward", f"gradient of {name}")


def kept(tensors: Sequence[Kept], n: int) -> list[Kept]:
    """For each of its rows a rank keeps what a single device keeps."""
    return list(tensors)
