"""What a torch program communicates: every call of torch.distributed, below whatever library makes it.

    with trace() as records:  # this rank's view
        step(batch)

All of them, those of DistributedDataParallel's C++ reducer, FSDP2 and DTensor too, go through torch's dispatcher as
operators c10d::* or _c10d_functional::*, in the backward pass as well, and in every thread: see `kernels`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardiff.ranks.c10d import C10D
from shardiff.record import Record
from shardiff.tracing.calls import Call
from shardiff.tracing.dispatch import Tracer
from shardiff.tracing.kernels import shown_to, watched
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
        stack.callback(register_optimizer_step_pre_hook(tracer.optimizer_begins).remove)
        stack.callback(register_optimizer_step_post_hook(tracer.optimizer_ends).remove)
        stack.callback(register_module_forward_pre_hook(tracer.module_begins).remove)
        stack.callback(register_module_forward_hook(tracer.module_ends, always_call=True).remove)
        for name in WAITS:
            before = None if name == "is_completed" else tracer.before_wait
            stack.enter_context(_told(dist.Work, name, tracer.work_awaited, before))
        stack.enter_context(_told(dist.ProcessGroup, "_start_coalescing", tracer.batch_begins))
        stack.enter_context(_told(dist.ProcessGroup, "_end_coalescing", tracer.batch_ends))
        stack.enter_context(_told(DeviceMesh, "__init__", tracer.names.note_mesh))
        for name in C10D:
            stack.enter_context(_asked(name, tracer))
        stack.enter_context(_differentiated(tracer))
        stack.enter_context(_threads(tracer))
        tracer.names.find_meshes()
        stack.enter_context(shown_to(tracer))
        stack.callback(tracer.close)
        tracer.attend()
        yield tracer.calls


def mark_step() -> None:
    """Note, wherever this thread is traced, that a training step has ended."""
    for tracer in watched().tracers:
        tracer.step_ends()


@contextmanager
def _replaced(owner: Any, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """A function or method that is another one for a while: made(original). torch.compile leaves it alone."""
    original = getattr(owner, name, None)  # what is not in this version of torch needs no watching
    if original is None:
        yield
        return
    own = vars(owner).get(name)  # not the same: what getattr gives of a class of C++ is no method any more
    setattr(owner, name, torch.compiler.disable(made(original), recursive=False))
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)


@contextmanager
def _told(
    owner: type, name: str, tell: Callable[..., None], before: Callable[[Any], None] | None = None
) -> Iterator[None]:
    """A method that also calls before(self) when it begins, and tell(name, self, its result) when it is done."""

    def made(original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if before:
                before(self)
            result = original(self, *args, **kwargs)
            tell(name, self, result)
            return result

        return method

    with _replaced(owner, name, made):
        yield


@contextmanager
def _asked(name: str, tracer: Tracer) -> Iterator[None]:
    """A method of process groups that tells the tracer which Work it has returned."""

    def made(original: Any) -> Any:
        def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            return tracer.method(original, group, args, kwargs)

        return method

    with _replaced(dist.ProcessGroup, name, made):
        yield


@contextmanager
def _differentiated(tracer: Tracer) -> Iterator[None]:
    """Backward passes that Python asks for are told to the tracer."""

    def made(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            tracer.backward_begins()
            try:
                return original(*args, **kwargs)
            finally:
                tracer.attend()

        return run

    with _replaced(torch.autograd, "_engine_run_backward", made):
        yield


@contextmanager
def _threads(tracer: Tracer) -> Iterator[None]:
    """Threads that the program starts are attended to from their start."""

    def made(original: Any) -> Any:
        def start(self: threading.Thread) -> None:
            run = self.run

            def attended() -> None:
                tracer.attend()
                run()

            if tracer.open:
                self.run = attended
            original(self)

        return start

    with _replaced(threading.Thread, "start", made):
        yield
