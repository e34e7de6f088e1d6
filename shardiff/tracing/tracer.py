"""What a torch program communicates: every call of torch.distributed, below whatever library makes it.

    with trace() as records:  # this rank's view
        step(batch)

All of them, those of DistributedDataParallel's C++ reducer, FSDP2 and DTensor too, go through torch's dispatcher as
operators c10d::* or _c10d_functional::*, where a TorchDispatchMode sees them, in the backward pass as well. It does not
see what other Python threads call.

`trace_run` merges the ranks of one of our strategies; `shardiff trace` those of any script.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

# A dispatch mode imports it at its first operator. That is too late once there is a process group: default arguments in
# torch.distributed.nn would keep the group, and its threads, past destroy_process_group.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from shardiff.record import Record
from shardiff.tracing.calls import MESSAGES, Call
from shardiff.tracing.merge import own_records
from shardiff.tracing.operators import OPERATORS, calls_of, detail, is_fake, short_name, tensors_in

NO_DISPATCH: Any = vars(Tensor)["__torch_dispatch__"]  # of classes that leave dispatching as it is
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
) -> Iterator[list[Call]]:
    """The calls that this process makes inside the `with`, for `merge`.

    tell: is given each, before it runs. hold: is called with the position of a call before this process waits for it:
    as it is made, or where an asynchronous one is waited for.
    """
    tracer = _Tracer(names, tell, hold)
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(lambda *_: tracer.enter("update")).remove)
        stack.callback(register_optimizer_step_post_hook(lambda *_: tracer.enter("forward")).remove)
        stack.callback(register_module_forward_pre_hook(tracer.module_begins).remove)
        stack.callback(register_module_forward_hook(tracer.module_ends, always_call=True).remove)
        for name in WAITS:
            before = None if name == "is_completed" else tracer.before_wait
            stack.enter_context(_told(dist.Work, name, tracer.work_awaited, before))
        stack.enter_context(_told(dist.ProcessGroup, "_start_coalescing", tracer.batch_begins))
        stack.enter_context(_told(dist.ProcessGroup, "_end_coalescing", tracer.batch_ends))
        stack.enter_context(tracer)
        yield tracer.calls


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


class _Tracer(TorchDispatchMode):
    """Turns operators into calls, and knows in which phase, and for which parameter or module, they run."""

    def __init__(
        self, names: dict[str, Tensor] | None, tell: Callable[[Call], None], hold: Callable[[int], None]
    ) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.pid = os.getpid()
        self.tell, self.hold, self.phase = tell, hold, "forward"
        self.params, self.find_params = dict(names or {}), names is None
        self.paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.running: list[str] = []  # the paths of the modules that run now, outermost first
        self.unwaited: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()  # Work -> its calls
        self.last_work: Any = None  # kept until Python has it too: it gets the same object only while that lives
        self.batch: list[int] | None = None  # the calls that are being coalesced
        self.unwaited_memory: dict[int, int] = {}  # what functional collectives fill, by address -> their calls

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile: what it makes is seen when it runs."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.last_work = None
        self.notice(func, args)
        kwargs = kwargs or {}
        kinds = {t.__name__ for t in types if t.__torch_dispatch__ is not NO_DISPATCH}
        if kinds and not kinds & {"FakeTensor", "FunctionalTensor"}:
            return NotImplemented  # a DTensor, say: its own operators on plain tensors come by here later
        if func.namespace not in OPERATORS:
            return func(*args, **kwargs)
        if short_name(func) == "wait_tensor":
            self.memory_awaited(args[0])
        positions = [self.add(call, tensors_in(args)) for call in calls_of(func, args, kwargs)]
        for i in positions:
            if not self.calls[i].is_async and self.batch is None:
                self.hold(i)
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            self.expect(result, positions)
        else:
            self.expect_memory(args, result, positions)
        return result

    def notice(self, func: Any, args: Any) -> None:
        """The phase: backward as soon as autograd's engine runs, forward again when a parameter is used outside of it.

        Between the two, as in the loop that all-reduces every gradient, it stays backward.
        """
        if torch._C._current_graph_task_id() != -1:  # private: what the engine runs now
            self.phase = "backward"
        elif self.phase == "backward" and torch.is_grad_enabled() and func.name() != "aten::detach":
            if any(t.requires_grad and t.is_leaf for t in args if isinstance(t, Tensor)):
                self.phase = "forward"

    def enter(self, phase: str) -> None:
        """An optimizer's step begins or ends."""
        self.phase = phase

    def module_begins(self, module: nn.Module, _: Any) -> None:
        """A module's forward is about to run; the first to do so names all in it."""
        if torch.compiler.is_compiling():
            return
        if torch._C._current_graph_task_id() == -1:
            self.phase = "forward"
        if module not in self.paths:
            for path, each in module.named_modules():
                self.paths.setdefault(each, path)
            known = set(map(id, self.params.values()))
            if self.find_params:
                self.params |= {name: p for name, p in module.named_parameters() if id(p) not in known}
        self.running.append(self.paths[module])

    def module_ends(self, *_: Any) -> None:
        """A module's forward has returned or raised."""
        if not torch.compiler.is_compiling() and self.running:
            self.running.pop()

    def add(self, call: Call, tensors: list[Tensor] | None = None) -> int:
        """Note and tell a call that is about to run. Returns its position."""
        if self.pid != os.getpid():  # in a child that was forked from the middle of it
            self.pid = os.getpid()
            self.calls.clear()
        of_whom = detail(tensors or [], self.params) or next((path for path in reversed(self.running) if path), None)
        self.calls.append(replace(call, phase=self.phase, detail=of_whom))
        self.tell(self.calls[-1])
        return len(self.calls) - 1

    def expect(self, result: Any, positions: list[int]) -> None:
        """Remember the Work that an operator returned, to know when it is waited for."""
        positions = [i for i in positions if self.calls[i].is_async or self.calls[i].op == "recv"]
        if self.batch is not None:
            self.batch += positions
        work = result[-1] if isinstance(result, tuple | list) else result
        if positions and isinstance(work, torch.ScriptObject):
            self.last_work = dist.Work.unbox(work)  # type: ignore[attr-defined]
            self.unwaited[self.last_work] = positions

    def batch_begins(self, *_: Any) -> None:
        """NCCL coalesces what follows, until `batch_ends` gives one Work for all of it."""
        self.batch = []

    def batch_ends(self, _name: str, _group: Any, work: Any) -> None:
        if work is not None and self.batch:
            self.last_work, self.unwaited[work] = work, self.batch
        self.batch = None

    def before_wait(self, work: Any) -> None:
        """A Work is about to be waited for."""
        for i in self.unwaited.get(work, ()):
            if self.calls[i].is_async:
                self.hold(i)

    def work_awaited(self, name: str, work: Any, result: Any) -> None:
        """A Work is done. Where a receive came from, if from anyone, is known now."""
        self.last_work = None  # not a reference longer than the program's own
        if name == "is_completed" and not result:
            return
        for i in self.unwaited.pop(work, ()):
            call = self.calls[i]
            if call.op == "send":
                continue
            from_any = call.op == "recv" and call.peer is None
            self.add(Call(call.rank, "wait", of=i, peer=call.ranks[work._source_rank()] if from_any else None))

    def expect_memory(self, args: Any, result: Any, positions: list[int]) -> None:
        """The same for functional collectives, which are waited for by their tensors."""
        messages = [i for i in positions if self.calls[i].op in MESSAGES]
        tensors = tensors_in(args if messages else result)
        for i, t in zip(messages or positions * len(tensors), tensors, strict=False):
            self.unwaited_memory[t.data_ptr()] = i

    def memory_awaited(self, t: Tensor) -> None:
        """A tensor is about to be waited for, in which a functional collective's result may come."""
        if self.unwaited_memory and not is_fake(t):
            i = self.unwaited_memory.pop(t.data_ptr(), None)
            if i is not None:
                self.hold(i)
                if self.calls[i].op == "recv":
                    self.add(Call(self.calls[i].rank, "wait", of=i))
