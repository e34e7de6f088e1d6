"""A backend whose collectives go through the host's memory over gloo, so that several ranks may share one GPU.

NCCL refuses two ranks on one device, and gloo has no kernels of its own for all collectives on CUDA. Here every
collective copies its tensors to the host, runs there over gloo, and copies back what it has written. This is slow, but
strategies, layouts and their proof then run on CUDA's numerics with any number of ranks. A caller does not notice:
`register` adds the backend the way that torch provides for, and groups that are made of it, those of a device mesh
too, are of the same kind. On CPU tensors it does the same, so that all but the device can be tried without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "staged"
# Methods of a process group that move tensors; the first argument of each is what it writes, but for a send. Some are
# of newer versions of torch alone.
METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "recv",
    "recv_anysource",
    "send",
)


def register() -> None:
    """Make the backend known to `init_process_group`, for CPU and CUDA tensors."""
    dist.Backend.register_backend(NAME, Staged, devices=["cpu", "cuda"])


class Staged(dist.ProcessGroup):
    """A process group; see above. Its methods, which are added below, take what those of every group take."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]  torch's stub has the other constructor alone
        self.on_host = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)  # pyright: ignore[reportPrivateImportUsage]
        for group in (self.on_host, self):  # this one only for its name, which is kept by the backend
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self.on_host.barrier()  # whose options could name a GPU


class Work(dist.Work):
    """A collective under way on the host; waited for, its result is on the device."""

    def __init__(self, work: dist.Work, outputs: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.work, self.outputs = work, outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the ranks that take part, then copy back, once."""
        self.work.wait() if timeout is None else self.work.wait(timeout)
        outputs, self.outputs = self.outputs, []
        with torch.no_grad():
            for device_tensor, host_tensor in outputs:
                device_tensor.copy_(host_tensor)
        return True

    def is_completed(self) -> bool:
        """Whether the ranks are done; the result is there only after `wait`."""
        return self.work.is_completed()


def method(name: str) -> Callable[..., Work]:
    """The method of `Staged` that does what gloo's of this name does."""

    def staged(group: Staged, *args: Any, **kwargs: Any) -> Work:
        pairs: list[tuple[Tensor, Tensor]] = []
        first, *rest = (host(value, pairs) if i == 0 or is_tensors(value) else value for i, value in enumerate(args))
        written = pairs[: count(args[0])] if name != "send" else []
        return Work(getattr(group.on_host, name)(first, *rest, **kwargs), written)

    return staged


def host(value: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """Copies on the host of a tensor, or of all tensors in a list, which may hold lists; adds (tensor, copy) to pairs.

    It copies what is on the host already too, so that both kinds of tensors are treated alike.
    """
    if isinstance(value, Tensor):
        pairs.append((value, value.detach().to("cpu", copy=True)))
        return pairs[-1][1]
    return [host(one, pairs) for one in value]


def is_tensors(value: Any) -> bool:
    """Whether an argument is a tensor, or a list of what is."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(is_tensors, value))
    return isinstance(value, Tensor)


def count(value: Any) -> int:
    """The number of tensors in a list, which may hold lists."""
    return 1 if isinstance(value, Tensor) else sum(map(count, value))


for _name in METHODS:
    setattr(Staged, _name, method(_name))
