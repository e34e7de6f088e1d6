"""ZeRO-1 (Rajbhandari et al., 1910.02054): data parallel whose optimizer state is split by the rows of the parameters.

Backward: all_reduce of every gradient, L (D^2 + D) e bytes in total, as in data_parallel. Update: each rank updates its
rows of every parameter, and the updated rows are gathered: all_gather, as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract.kept import Kept
from contract.problem import Problem, split_sizes
from contract.share import Asked, Part, Sent, Share, narrow_rows, uneven_rows

AXIS = "fsdp"
UNIT = 1
DEPTH = 1
SPLITS = ("optimizer_state",)


def refusal(asked: Asked, n: int) -> str | None:
    """The rows of every parameter must divide evenly, and every rank needs a sample."""
    return uneven_rows("zero1", asked, n)


def rows(total: int, n: int) -> list[int]:
    """The samples are split as equally as possible."""
    return split_sizes(total, n)


def cut(parts: Sequence[Part], problem: Problem, n: int, index: int, unit: int) -> list[Part]:
    """The rows whose optimizer state a rank has: M[D_fsdp, F] of W[D, F], m[F_fsdp] of b[F]."""
    return narrow_rows(parts, problem, n, index)


def communication(share: Share, n: int) -> Iterator[Sent]:
    """The loss; every gradient, the bias before the weight; the updated parameters. `share` has whole ones."""
    yield share.loss()
    for part in reversed(share.parts):
        for name, elements in reversed(share.tensors(part)):
            yield Sent("all_reduce", elements, "backward", f"gradient of {name}")
    for part in share.parts:
        for name, elements in share.tensors(part):
            yield Sent("all_gather", elements, "update", name)


def kept(tensors: Sequence[Kept], n: int) -> list[Kept]:
    """For each of its rows a rank keeps what a single device keeps."""
    return list(tensors)
