"""What a torch step holds, measured: bytes of live tensors, of what autograd keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter


def local(t: Tensor) -> Tensor:
    """A rank's own part of a DTensor; another tensor itself."""
    return t.to_local() if isinstance(t, DTensor) else t


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the tensors' memory, each storage once: views of one bucket are one bucket."""
    storages = [local(t).untyped_storage() for t in tensors if t is not None]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def held(leaves: list[Tensor], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state after a step."""
    state = [v for of_leaf in optimizer.state.values() for v in of_leaf.values() if isinstance(v, Tensor)]
    return {
        "parameters": nbytes(leaves),
        "gradients": nbytes(p.grad for p in leaves),
        "optimizer_state": nbytes(state),
    }


def kept_for_backward(
    step: Callable[[], Any], not_counted: list[Tensor], beside: Callable[[], int] = lambda: 0
) -> int | None:
    """The most bytes that autograd keeps at any time of a step, but for `not_counted` (parameters and batch).

    beside: bytes kept at the moment that autograd does not know of, such as gradients that are put off. None where
    autograd keeps DTensors or other wrappers, which have no storage of their own.
    """
    if any(isinstance(t, DTensor) for t in not_counted):
        return None
    known = {t.untyped_storage().data_ptr() for t in not_counted}
    uses: Counter[int] = Counter()
    now = most = 0
    wrapped = False

    class Kept:
        def __init__(self, t: Tensor) -> None:
            nonlocal now, wrapped
            self.tensor = t.detach()  # not t itself: an operation that keeps its own output would never be freed
            self.key = self.size = 0
            if type(t) in (Tensor, Parameter):
                storage = self.tensor.untyped_storage()
                self.key, self.size = storage.data_ptr(), storage.nbytes()  # 0 and 0 of torch.empty(0)
            else:
                wrapped = True
            uses[self.key] += 1
            if uses[self.key] == 1 and self.key not in known:
                now += self.size
            look()

        def __del__(self) -> None:
            nonlocal now
            uses[self.key] -= 1
            if uses[self.key] == 0 and self.key not in known:
                now -= self.size

    def look() -> None:
        nonlocal most
        most = max(most, now + beside())

    def unpack(kept: Kept) -> Tensor:
        look()  # here too, because what is put off grows in a backward pass
        return kept.tensor

    with torch.autograd.graph.saved_tensors_hooks(Kept, unpack):
        step()
    return None if wrapped else most
