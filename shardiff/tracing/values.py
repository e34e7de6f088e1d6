"""Whether replicas are equal bit by bit where a collective, or DistributedDataParallel, says that they are.

On a rank the values are noted as hashes; `shardiff.tracing.silent` finds afterwards what differs between ranks.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardiff.tracing.libraries import is_ddp
from shardiff.tracing.operators import tensors_in

REPLICATED = ("all_reduce", "all_gather", "broadcast")  # every rank of the group has the same result


class Values:
    """Notes hashes of results, and of the parameters of every DistributedDataParallel. mark: notes a text, and the
    position of the call that it is about."""

    def __init__(self, mark: Callable[..., None]) -> None:
        self.mark = mark
        self.expected: dict[int, list[Any]] = {}  # position of a call -> the tensors in which its result comes
        self.memory: dict[int, tuple[int, Any]] = {}
        self.modules: weakref.WeakSet[Any] = weakref.WeakSet()
        self.number = 0

    def expect(self, position: int, call: Any, args: Any) -> None:
        """The result of a c10d operator, which comes in its first argument."""
        if call.op in REPLICATED:
            self.expected[position] = tensors_in(args[0])

    def awaited(self, position: int) -> None:
        """The result is there."""
        if (tensors := self.expected.pop(position, None)) is not None:
            self.mark(f"value {digest(tensors)}", position)

    def expect_memory(self, position: int, call: Any, t: Any) -> None:
        """The result of a functional collective."""
        if call.op in REPLICATED:
            self.memory[t.data_ptr()] = position, call

    def awaited_memory(self, t: Any) -> None:
        if (found := self.memory.pop(t.data_ptr(), None)) is not None:
            self.mark(f"value {digest([t])}", found[0])

    def parameters(self, module: Any = None) -> None:
        """Those of a DistributedDataParallel that runs for the first time; without one, of all, after a step."""
        if module is None:
            self.number += 1
            modules, when = list(self.modules), f"after step {self.number}"
        else:
            modules = [each for each in module.modules() if is_ddp(each) and each not in self.modules]
            when = "at the start"
        for each in modules:
            self.modules.add(each)
            hashes = {name: digest([p.detach()]) for name, p in each.module.named_parameters()}
            about = {"when": when, "ranks": dist.get_process_group_ranks(each.process_group), "hashes": hashes}
            self.mark(f"parameter {json.dumps(about)}")


def digest(tensors: Sequence[Any]) -> str:
    """Of the bits of tensors."""
    found = hashlib.blake2b(digest_size=12)
    with torch.no_grad():
        for t in tensors:
            plain = getattr(t, "_local_tensor", t).detach().cpu().contiguous()
            found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return found.hexdigest()
