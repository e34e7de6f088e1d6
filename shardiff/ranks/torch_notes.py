"""What a torch rank notes while it works: the collective that it calls, and the phase that a training step is in.

`trace` sees every call, and slows every operator down. This is for ranks that are timed: it costs 2 microseconds per
collective, and nothing else. It sees what goes through the methods of ProcessGroup in Python, as every function of
torch.distributed does, also those of pipelining and FSDP2. It does not see what C++ calls: the reducer of
DistributedDataParallel, and the functional collectives that DTensor uses. Nor does it see whether a call has ended: a
call is noted when it begins, an asynchronous one when it is started, not when it is waited for.

The phases: "backward" when autograd begins, "update" when an optimizer steps, "forward" when it has stepped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardiff.ranks.c10d import BARRIERS, COLLECTIVES

Tell = Callable[[int, int, bytes, bytes], None]  # the number of the call in its group, bytes, op, group or peer

METHODS = COLLECTIVES | {"barrier": BARRIERS["barrier"]}
POINT_TO_POINT = {"send": "send to", "recv": "receive from", "recv_anysource": "receive from any of"}


def watch(tell: Tell, report_phase: Callable[[str], None]) -> None:
    """Tell of every call and phase from now on, for good. For processes that are ranks, or that fork ranks."""
    groups: dict[str, bytes] = {}
    numbers: dict[tuple[str, bool], int] = {}  # (group, whether point to point) -> calls so far

    def count(group: dist.ProcessGroup, alone: bool) -> tuple[int, bytes]:
        name = group.group_name
        number = numbers[name, alone] = numbers.get((name, alone), 0) + 1
        text = groups.get(name)
        if text is None:
            text = groups[name] = ranks_of(group).encode()
        return number, text

    def collective(original: Any, op: bytes, position: int, per_rank: bool) -> Any:
        def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            number, text = count(group, False)
            size = nbytes(args[position]) if op != b"barrier" and len(args) > position else 0
            tell(number, size * group.size() if per_rank else size, op, text)
            return original(group, *args, **kwargs)

        return method

    def point_to_point(original: Any, op: str, with_peer: bool) -> Any:
        def method(group: dist.ProcessGroup, tensors: Any, *args: Any) -> Any:
            number, text = count(group, True)
            what = f"{op} {args[0]}" if with_peer else op
            tell(number, nbytes(tensors), what.encode(), text)
            return original(group, tensors, *args)

        return method

    for name, (op, position, per_rank) in METHODS.items():
        if (original := getattr(dist.ProcessGroup, name, None)) is not None:
            setattr(dist.ProcessGroup, name, collective(original, op.encode(), position, per_rank))
    for name, op in POINT_TO_POINT.items():
        method = point_to_point(getattr(dist.ProcessGroup, name), op, name != "recv_anysource")
        setattr(dist.ProcessGroup, name, method)

    backward = torch.autograd.backward

    def noted_backward(*args: Any, **kwargs: Any) -> None:
        report_phase("backward")
        backward(*args, **kwargs)

    torch.autograd.backward = noted_backward
    register_optimizer_step_pre_hook(lambda *_: report_phase("update"))
    register_optimizer_step_post_hook(lambda *_: report_phase("forward"))


def ranks_of(group: dist.ProcessGroup) -> str:
    """The group in words, such as "ranks 0 1 2 3", as the default group numbers them."""
    with suppress(KeyError, ValueError, RuntimeError):  # the group is still being made
        return f"ranks {' '.join(map(str, dist.get_process_group_ranks(group)))}"
    return f"{group.size()} ranks"


def nbytes(tensors: Any) -> int:
    """The bytes of a tensor, or of all tensors in a list, which may hold lists."""
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(nbytes, tensors))
