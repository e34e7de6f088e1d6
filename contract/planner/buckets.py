"""The buckets of gradients that are sent while the backward pass runs, and what has filled them."""

from __future__ import annotations

from collections.abc import Iterator

from contract.buckets import bucketed
from contract.problem import BYTES
from contract.share import Sent, Share
from contract.strategy import Run

REPLICATED = ("data_parallel", "zero1")  # whose gradients torch_impl sums in buckets, over the outermost of them
SCATTERED_LATER = ("zero2",)  # after the backward pass, so that nothing is summed before


class Buckets:
    """The buckets of the one axis whose gradients are sent while the backward pass runs, and what has filled them."""

    def __init__(self, run: Run, mine: Share) -> None:
        replicas = [axis.name for axis in run.nested if axis.size > 1 and axis.strategy in REPLICATED]
        buckets = run.overlap and run.implementation == "torch" and not set(SCATTERED_LATER) & set(run.strategies)
        self.axis = replicas[0] if replicas and buckets else None
        of_element = BYTES[run.problem.dtype]
        names, elements = [], []
        for part in reversed(mine.parts):
            for name, size in reversed(mine.tensors(part)):
                names.append(name)
                elements.append(size)
        groups = bucketed([n * of_element for n in elements])
        self.waiting = [{names[i] for i in group} for group in groups]
        self.elements = [sum(elements[i] for i in group) for group in groups]
        self.sent = 0

    def ready(self, name: str) -> Iterator[Sent]:
        """A gradient is complete: the buckets that can be sent now, in their order."""
        for group in self.waiting:
            group.discard(name)
        while self.sent < len(self.waiting) and not self.waiting[self.sent]:
            yield Sent("all_reduce", self.elements[self.sent], "backward", f"bucket {self.sent}")
            self.sent += 1
