"""Records what a process holds while it trains: memory, open files, sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import psutil


class Look(NamedTuple):
    """What a process holds before a step: resident bytes, open file descriptors, and how many of those are sockets."""

    step: int
    rss: int
    files: int
    sockets: int


@contextmanager
def looking(train: ModuleType, every: int) -> Iterator[list[Look]]:
    """Record a Look before every `every`th step of `train`, which is one of the two modules of that name."""
    looks: list[Look] = []
    process, make_batch = psutil.Process(), train.make_batch

    def look_and_make_batch(mesh: Any, run: Any, step: int, *rest: Any) -> Any:
        if step % every == 0 and (not looks or looks[-1].step != step):
            sockets = len(process.net_connections("all"))
            looks.append(Look(step, process.memory_info().rss, process.num_fds(), sockets))
        return make_batch(mesh, run, step, *rest)

    train.make_batch = look_and_make_batch
    try:
        yield looks
    finally:
        train.make_batch = make_batch
