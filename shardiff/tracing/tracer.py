"""What a torch program communicates: every call of torch.distributed, below whatever library makes it.

    with trace() as records:  # this rank's view
        step(batch)

All of them, those of DistributedDataParallel's C++ reducer, FSDP2 and DTensor too, go through torch's dispatcher as
operators c10d::* or _c10d_functional::*, where a TorchDispatchMode sees them, in the backward pass as well. A mode is
one thread's: threads that the program starts get one each, and a call from a thread of C++, as in the callback of a
Future, is given one for as long as it takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardiff.ranks.c10d import C10D
from shardiff.record import Record
from shardiff.tracing.calls import Call
from shardiff.tracing.dispatch import Mode, Tracer
from shardiff.tracing.libraries import modes
from shardiff.tracing.merge import own_records

WAITS = ("wait", "synchronize", "block_current_stream", "is_completed")


@contextmanager
def trace(names: dict[str, Tensor] | None = None) -> Iterator[list[Record]]:
    """The collectives that run inside the `with`, as this rank sees them; the list is filled when the `with` ends.

    names: parameters, for the field `detail` of what sends their gradients; by default those of the modules that run.
    """
    records: list[Record] = []
    with capture(names) as calls:
        try:
            yield records
        finally:
            records += own_records(calls)


@contextmanager
def capture(
    names: dict[str, Tensor] | None = None,
    tell: Callable[[Call], None] = lambda call: None,
    hold: Callable[[int], None] = lambda position: None,
    first_phase: str = "forward",
    values: bool = False,
    groups: dict[str, Any] | None = None,
) -> Iterator[list[Call]]:
    """The calls that this process makes inside the `with`, for `merge`.

    tell: is given each, before it runs. hold: is called with the position of a call before this process waits for it:
    as it is made, or where an asynchronous one is waited for. first_phase: "other" for a program that sets up first.
    values: note the values of results and parameters too, for `shardiff.tracing.silent.differences`. groups: keeps the
    process groups that are seen: see Tracer.
    """
    tracer = Tracer(names, tell, hold, first_phase, values, groups)
    with ExitStack() as stack:
        phases = tracer.phases
        stack.callback(register_optimizer_step_pre_hook(phases.optimizer_begins).remove)
        stack.callback(register_optimizer_step_post_hook(tracer.optimizer_ends).remove)
        stack.callback(register_module_forward_pre_hook(tracer.module_begins).remove)
        stack.callback(register_module_forward_hook(tracer.module_ends, always_call=True).remove)
        for name in WAITS:
            before = None if name == "is_completed" else tracer.before_wait
            stack.enter_context(_told(dist.Work, name, tracer.work_awaited, before))
        stack.enter_context(_told(dist.ProcessGroup, "_start_coalescing", tracer.batch_begins))
        stack.enter_context(_told(dist.ProcessGroup, "_end_coalescing", tracer.batch_ends))
        stack.enter_context(_told(DeviceMesh, "__init__", tracer.names.note_mesh))
        stack.enter_context(_every_thread(tracer))
        tracer.names.find_meshes()
        stack.enter_context(Mode(tracer))
        yield tracer.calls


def mark_step() -> None:
    """Note, wherever this thread is traced, that a training step has ended."""
    for mode in modes():
        if type(mode).__qualname__ == Mode.__qualname__ and type(mode).__module__ == Mode.__module__:
            mode.tracer.step_ends()  # type: ignore[attr-defined]  # perhaps of another copy of this module


@contextmanager
def _told(
    owner: type, name: str, tell: Callable[..., None], before: Callable[[Any], None] | None = None
) -> Iterator[None]:
    """A method that also calls before(self) when it begins, and tell(name, self, its result) when it is done."""
    original = getattr(owner, name, None)  # what is not in this version of torch needs no watching
    if original is None:
        yield
        return

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before:
            before(self)
        result = original(self, *args, **kwargs)
        tell(name, self, result)
        return result

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _every_thread(tracer: Tracer) -> Iterator[None]:
    """Calls from other threads are seen too: Python's from their start, those of C++ while they are in a call."""

    def seen(original: Any) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            if tracer.sees_this_thread():
                return original(*args, **kwargs)
            with Mode(tracer):
                return original(*args, **kwargs)

        return method

    def start(self: threading.Thread) -> None:
        run = self.run

        def traced() -> None:
            with Mode(tracer):
                run()

        if tracer.open:
            self.run = traced
        thread_start(self)

    thread_start = threading.Thread.start
    originals = {name: getattr(dist.ProcessGroup, name) for name in C10D if hasattr(dist.ProcessGroup, name)}
    for name, original in originals.items():
        setattr(dist.ProcessGroup, name, seen(original))
    threading.Thread.start = start
    try:
        yield
    finally:
        tracer.open = False
        threading.Thread.start = thread_start
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)
