"""The buckets of gradients that are sent while the backward pass runs, and what has filled them."""

from __future__ import annotations

from collections.abc import Iterator

from contract.buckets import bucketed
from contract.problem import BYTES
from contract.share import Sent, Share
from contract.strategy import Run

REPLICATED = ("data_parallel", "zero1")  # whose gradients torch_impl sums in buckets, over the outermost of them
LOSS = "loss"


class Buckets:
    """The buckets of the one axis whose gradients are sent while the backward pass runs, and what has filled them."""

    def __init__(self, run: Run, mine: Share, scattered: bool) -> None:
        """scattered: whether gradients are scattered, and the shards are summed one by one."""
        replicas = [axis.name for axis in run.nested if axis.size > 1 and axis.strategy in REPLICATED]
        buckets = run.overlap and run.implementation == "torch" and not scattered
        self.axis = replicas[0] if replicas and buckets else None
        loss = mine.loss()
        found = [(name, n) for part in reversed(mine.parts) for name, n in reversed(mine.tensors(part))]
        names, elements = zip(*found, (LOSS, loss.elements), strict=True)
        dtypes = [*(run.problem.dtype for _ in found), loss.dtype or run.problem.dtype]
        groups = bucketed([n * BYTES[dtype] for n, dtype in zip(elements, dtypes, strict=True)], dtypes)
        self.waiting = [{names[i] for i in group} - {LOSS} for group in groups]
        self.sums = [
            Sent("all_reduce", sum(elements[i] for i in group), "backward", f"bucket {number}", dtypes[group[0]])
            for number, group in enumerate(groups)
        ]
        self.sent = 0

    def ready(self, name: str) -> Iterator[Sent]:
        """A gradient is complete: the buckets that can be sent now, in their order."""
        for group in self.waiting:
            group.discard(name)
        while self.sent < len(self.waiting) and not self.waiting[self.sent]:
            yield self.sums[self.sent]
            self.sent += 1
