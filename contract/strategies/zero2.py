"""ZeRO-2 (Rajbhandari et al., 1910.02054): data parallel whose gradients and optimizer state are split by rows.

Backward: reduce_scatter of every gradient, L (D^2 + D) e bytes in total, once per step. Update: each rank updates its
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
SPLITS = ("gradients", "optimizer_state")


def refusal(asked: Asked, n: int) -> str | None:
    """The rows of every parameter must divide evenly, and every rank needs a sample."""
    return uneven_rows("zero2", asked, n)


def rows(total: int, n: int) -> list[int]:
    """The samples are split as equally as possible."""
    return split_sizes(total, n)


def cut(parts: Sequence[Part], problem: Problem, n: int, index: int, unit: int) -> list[Part]:
    """The rows whose gradients and optimizer state a rank has: dW[D_fsdp, F] of W[D, F], db[F_fsdp] of b[F]."""
    return narrow_rows(parts, problem, n, index)


def communication(share: Share, n: int) -> Iterator[Sent]:
    """The loss; every gradient; and the updated parameters. `share` has whole parameters."""
    yield share.loss()
    for part in reversed(share.parts):
        for name, elements in share.messages(part):
            yield Sent("reduce_scatter", elements, "backward", f"gradient of {name}")
    for part in share.parts:
        for name, elements in share.tensors(part):
            yield Sent("all_gather", elements, "update", name)


def kept(tensors: Sequence[Kept], n: int) -> list[Kept]:
    """For each of its rows a rank keeps what a single device keeps."""
    return list(tensors)
