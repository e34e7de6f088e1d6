"""Only collectives pass by a trace, and it leaves torch, and the dispatch modes of a program, as they are."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardiff.ranks.c10d import C10D
from shardiff.ranks.torch_pool import Workers
from shardiff.tracing.dispatch import FirstUse
from shardiff.tracing.kernels import watched
from shardiff.tracing.libraries import modes
from shardiff.tracing.tracer import WAITS, capture


class Counted(TorchDispatchMode):
    """A mode of the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **kwargs or {})


class Seen(nn.Module):
    """Multiplies by its parameter, and notes the dispatch modes at work, in both passes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.modes: list[list[TorchDispatchMode]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(modes())
        y = x * self.w
        y.register_hook(lambda grad: self.modes.append(modes()))
        return y


def in_a_step(device: torch.device) -> list[int]:
    """On each rank: how many dispatch modes are at work in a module's passes, and in an optimizer's step."""
    net = Seen()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: net.modes.append(modes()))
    with capture(first_phase="other"):
        for _ in range(2):
            net(torch.ones(4)).sum().backward()
            optimizer.step()
    return [len(each) for each in net.modes]


def test_nothing_but_collectives_passes_by_a_trace_of_modules(pool: Workers) -> None:
    assert pool.call(in_a_step, world_size=2) == [[0] * 6] * 2


def raw() -> dict[str, Any]:
    """What a trace replaces, as it stands in its class: getattr would give something else of a class of C++."""
    names = [(dist.ProcessGroup, name) for name in (*C10D, "_start_coalescing", "_end_coalescing")]
    names += [(dist.Work, name) for name in WAITS]
    names += [(torch.autograd, "_engine_run_backward"), (threading.Thread, "start")]
    return {f"{owner.__name__}.{name}": vars(owner).get(name) for owner, name in names}


def left_behind(device: torch.device) -> list[Any]:
    """On each rank: what a trace has changed for good, with a mode of the program's own that outlives phases of it."""
    before, w, own = raw(), torch.ones(4, requires_grad=True), Counted()
    with capture(first_phase="other") as calls:
        with own:  # in which the trace's mode comes and goes
            stacks = [modes()]
            (w * 2).sum().backward()
            dist.all_reduce(w.grad)
            stacks.append(modes())
        stacks.append(modes())
    seen = watched()
    return [
        [[type(mode) for mode in stack] for stack in stacks],
        own.operators > 4,
        [name for name, value in raw().items() if value is not before[name]],
        modes(),
        seen.tracers,
        seen.libraries,
        [(call.op, call.phase) for call in calls if call.op == "all_reduce"],
    ]


def test_a_trace_leaves_nothing_behind_and_a_programs_modes_in_their_order(pool: Workers) -> None:
    stacks = [[FirstUse, Counted], [FirstUse, Counted], [FirstUse]]
    expected = [stacks, True, [], [], [], [], [("all_reduce", "backward")]]
    assert pool.call(left_behind, world_size=2) == [expected] * 2


def phases_without_modules(device: torch.device) -> list[tuple[str, int, str]]:
    """On each rank: the calls of a program without modules, whose loss is averaged after each backward pass."""
    w = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.1)
    with capture(first_phase="other") as calls:
        dist.broadcast(w.data, 0)
        for _ in range(2):
            share = (w * 2).sum()
            dist.all_reduce(share.detach().clone())
            share.backward()
            dist.all_reduce(share / 2)  # differentiable, and yet no forward pass: no parameter is used
            dist.all_reduce(w.grad)
            optimizer.step()
            dist.all_reduce(torch.ones(2))
    return [(call.op, call.payload_bytes, call.phase) for call in calls if call.op not in ("wait", "mark")]


def test_a_forward_pass_without_a_module_begins_with_the_use_of_a_parameter(pool: Workers) -> None:
    step = [
        ("all_reduce", 4, "forward"),
        ("all_reduce", 4, "backward"),
        ("all_reduce", 16, "backward"),
        ("all_reduce", 8, "other"),
    ]
    assert pool.call(phases_without_modules, world_size=2) == [[("broadcast", 16, "other"), *step, *step]] * 2
