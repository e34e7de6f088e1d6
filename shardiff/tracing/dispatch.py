"""The operators of torch.distributed that a process runs, read as calls, with their phase and what they move."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

# A dispatch mode imports it at its first operator. That is too late once there is a process group: default arguments in
# torch.distributed.nn would keep the group, and its threads, past destroy_process_group.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardiff.tracing.calls import MESSAGES, Call, filled, made
from shardiff.tracing.libraries import beneath
from shardiff.tracing.names import Names, parts_of_unit
from shardiff.tracing.operators import Asked, Group, calls_of, is_fake, ranks_of, short_name, tensors_in
from shardiff.tracing.phases import Phases
from shardiff.tracing.values import Values
from shardiff.tracing.where import Where, where

NO_DISPATCH: Any = vars(Tensor)["__torch_dispatch__"]  # of classes that leave dispatching as it is


class FirstUse(TorchDispatchMode):
    """Sees the operator with which a forward pass begins that no module announces. It is there for as long only as
    that may be any operator, since a mode has a price for each."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.tracer.open:
            self.tracer.phases.notice(func, args)
        kinds = {t.__name__ for t in types if t.__torch_dispatch__ is not NO_DISPATCH}
        if kinds and not kinds & {"FakeTensor", "FunctionalTensor"}:
            return NotImplemented  # a DTensor, say: its own operators on plain tensors come by here later
        return func(*args, **kwargs or {})


class OfThread(threading.local):
    """What a tracer knows of the thread that asks."""

    def __init__(self) -> None:
        self.running: list[str] = []  # the paths of the modules that run now, outermost first
        self.asked: Asked | None = None  # the method of a process group that runs
        self.made: list[int] = []  # its calls
        self.batch: list[int] | None = None  # those that are being coalesced
        self.inside = False  # an operator runs, and what it calls itself is a part of it


class Tracer:
    """Turns operators into calls, and knows in which phase, and for which parameter or module, they run.

    groups: keeps every process group that is seen, for as long as it is kept itself. A tensor that one of our kernels
    has seen is a Python object, for whose end gloo's thread needs the GIL. Where DistributedDataParallel is the last to
    hold a group, its reducer waits, with the GIL, for that thread to end; so it must not be the last while the thread
    has work.
    """

    def __init__(
        self,
        names: dict[str, Tensor] | None,
        tell: Callable[[Call], None],
        hold: Callable[[int], None],
        first_phase: str = "forward",
        values: bool = False,
        groups: dict[str, Any] | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self.pid, self.lock, self.open = os.getpid(), threading.Lock(), True
        self.tell, self.hold = tell, hold
        self.phases = Phases(first_phase, self.mark)
        self.names = Names(names)
        self.groups = {} if groups is None else groups
        self.values = Values(self.mark) if values else None
        self.thread = OfThread()
        self.known: dict[int, tuple[int, Group]] = {}  # by a group's id -> how many meshes there were, what is known
        self.first_use = FirstUse(self)
        self.unwaited: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()  # Work -> its calls
        self.unwaited_memory: dict[int, int] = {}  # what functional collectives fill, by address -> their calls
        self.unseen: set[str] = set()

    def operator(self, func: Any, args: Any, kwargs: Any, go: Callable[[], Any]) -> Any:
        """An operator of torch.distributed is about to run; go() runs it."""
        thread = self.thread
        if thread.inside or not self.open:
            return go()
        self.phases.notice(func, args)
        if short_name(func) == "wait_tensor":
            self.memory_awaited(args[0])
        at = where()
        calls = calls_of(func, args, kwargs, at, thread.asked, self.group, self.not_seen)
        positions = [self.add(call, args, at) for call in calls]
        for i in positions:
            if not self.calls[i].is_async and thread.batch is None:
                self.hold(i)
        thread.inside = True
        try:
            result = go()
        finally:
            thread.inside = False
        if func.namespace == "c10d":
            if thread.asked:
                thread.made += positions
            if self.values and positions:
                self.values.expect(positions[0], self.calls[positions[0]], args)
        else:
            self.expect_memory(args, result, positions)
            if self.values and short_name(func) == "wait_tensor":
                self.values.awaited_memory(args[0])
        return result

    def group(self, group: Any) -> Group:
        """What is known of a group; it is kept from now on."""
        meshes, known = self.known.get(id(group), (-1, None))
        if known is None or (known.axis is None and meshes < self.names.num_meshes):
            self.groups[f"{id(group)}"] = group
            known = Group(group.group_name, *ranks_of(group), self.names.axis(group))
            self.known[id(group)] = self.names.num_meshes, known
        return known

    def attend(self, *_: Any) -> None:
        """Watch this thread's operators from now on, or no longer, as the phase is."""
        beneath(self.first_use, self.open and self.phases.open_to_any())

    def module_begins(self, module: nn.Module, _: Any) -> None:
        """A module's forward is about to run; the first to do so names all in it."""
        if torch.compiler.is_compiling():
            return
        running = self.thread.running
        if not running:
            self.phases.module_runs()
            self.attend()
            self.names.learn(module)
            if self.values:
                self.values.parameters(module)
        running.append(self.names.paths.get(module, ""))

    def module_ends(self, module: nn.Module, *_: Any) -> None:
        """A module's forward has returned or raised."""
        if not torch.compiler.is_compiling() and self.thread.running:
            self.thread.running.pop()
            if not self.thread.running:
                self.phases.evaluates = False
                self.attend()
            self.names.note_buckets(module)

    def backward_begins(self) -> None:
        """Autograd's engine is about to run."""
        self.phases.turn("backward")
        beneath(self.first_use, False)

    def optimizer_begins(self, *_: Any) -> None:
        """An optimizer's step begins, perhaps inside another's."""
        self.phases.optimizer_begins()
        self.attend()

    def optimizer_ends(self, *_: Any) -> None:
        """An optimizer's step has ended, perhaps inside another's."""
        self.phases.optimizer_ends()
        self.attend()
        if self.values and not self.phases.depth:
            self.values.parameters()

    def step_ends(self) -> None:
        """The program says that a training step has ended."""
        self.phases.begun = False
        self.phases.phase = "other"
        self.mark("step")
        self.attend()

    def not_seen(self, operator: str) -> None:
        """An operator communicates that nobody knows here."""
        if operator not in self.unseen:
            self.unseen.add(operator)
            self.mark(f"unseen {operator}")

    def mark(self, text: str, of: int | None = None) -> None:
        """Note what is no call, once this process is a rank."""
        if dist.is_initialized():
            self.note(made(dist.get_rank(), "mark", detail=text, of=of))

    def close(self) -> None:
        """No more calls are noted, in whichever thread."""
        self.open = False
        self.attend()

    def note(self, call: Call) -> int:
        """Note and tell a call. Returns its position."""
        with self.lock:
            if self.pid != os.getpid():  # in a child that was forked from the middle of it
                self.pid = os.getpid()
                self.calls.clear()
            filled(call, time=time.time())
            self.calls.append(call)
            self.tell(call)
            return len(self.calls) - 1

    def add(self, call: Call, args: Any = (), at: Where | None = None) -> int:
        """Note and tell a call that is about to run. Returns its position."""
        at = at or Where()
        phase, running = self.phases.of(at), self.thread.running
        if phase != "backward":
            self.names.sent.clear()
        moved = self.names.moved(tensors_in(args)) if self.names.params else None
        if moved is None and at.reducer and phase == "backward" and call.op == "all_reduce":
            moved = self.names.bucket(call.payload_bytes)
        if moved is None and at.unit is not None:
            gathered = call.op == "all_gather"
            moved = ("parameter", at.unit) if gathered else ("gradient", f"gradients of {at.unit}")
            filled(call, parts=call.parts or parts_of_unit(at.params, call))
        moves, detail = moved or (None, at.about or next((path for path in reversed(running) if path), None))
        return self.note(filled(call, phase=phase, detail=detail, moves=moves))

    def method(self, original: Callable[..., Any], group: Any, args: Any, kwargs: Any) -> Any:
        """Python calls a method of a process group, which returns a Work."""
        self.attend()
        thread = self.thread
        outer = thread.asked, thread.made
        thread.asked, thread.made = Asked(group, args[-1] if args else kwargs.get("opts")), []
        try:
            work = original(group, *args, **kwargs)
            self.expect(work, thread.made)
        finally:
            thread.asked, thread.made = outer
        return work

    def expect(self, work: Any, positions: list[int]) -> None:
        """Remember the Work that these calls have, to know when they are waited for."""
        positions = [i for i in positions if self.calls[i].is_async or self.calls[i].op == "recv" or self.values]
        if self.thread.batch is not None:
            self.thread.batch += positions
        if positions and isinstance(work, dist.Work):
            self.unwaited[work] = positions

    def batch_begins(self, *_: Any) -> None:
        """NCCL coalesces what follows, until `batch_ends` gives one Work for all of it."""
        self.thread.batch = []

    def batch_ends(self, _name: str, _group: Any, work: Any) -> None:
        if work is not None and self.thread.batch:
            self.unwaited[work] = self.thread.batch
        self.thread.batch = None

    def before_wait(self, work: Any) -> None:
        """A Work is about to be waited for."""
        for i in self.unwaited.get(work, ()):
            if self.calls[i].is_async:
                self.hold(i)

    def work_awaited(self, name: str, work: Any, result: Any) -> None:
        """A Work is done. Where a receive came from, if from anyone, is known now."""
        if name == "is_completed" and not result:
            return
        for i in self.unwaited.pop(work, ()):
            call = self.calls[i]
            if self.values:
                self.values.awaited(i)
            if call.op == "send" or not (call.is_async or call.op == "recv"):
                continue
            from_any = call.op == "recv" and call.peer is None
            self.note(made(call.rank, "wait", of=i, peer=call.ranks[work._source_rank()] if from_any else None))

    def expect_memory(self, args: Any, result: Any, positions: list[int]) -> None:
        """The same for functional collectives, which are waited for by their tensors."""
        messages = [i for i in positions if self.calls[i].op in MESSAGES]
        tensors = tensors_in(args if messages else result)
        for i, t in zip(messages or positions * len(tensors), tensors, strict=False):
            self.unwaited_memory[t.data_ptr()] = i
            if self.values:
                self.values.expect_memory(i, self.calls[i], t)

    def memory_awaited(self, t: Tensor) -> None:
        """A tensor is about to be waited for, in which a functional collective's result may come."""
        if self.unwaited_memory and not is_fake(t):
            i = self.unwaited_memory.pop(t.data_ptr(), None)
            if i is not None:
                self.hold(i)
                if self.calls[i].op == "recv":
                    self.note(made(self.calls[i].rank, "wait", of=i))
