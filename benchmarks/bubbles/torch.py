"""Timelines of torch_impl.explicit.pipeline_parallel, recorded from outside: the strategy runs as it is.

What it calls by name is wrapped while recording: its own `forward` and `squared_error`, Tensor.backward, and isend,
irecv and all_reduce of torch.distributed, whose works' `wait` is recorded too. An event costs two readings of the
clock. One thing is added: the first stage computes the gradient of its input as the others do, so that all stages do
the same work, as (p - 1) / (m + p - 1) supposes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.documents.bubbles import Event
from contract.problem import Layer
from contract.schedule import actions, gpipe
from contract.strategy import Run
from shardiff.ranks.torch_pool import report_phase
from torch_impl import train
from torch_impl.explicit import pipeline_parallel


def record(device: torch.device, run: Run, iterations: int, warmup: int = 2) -> list[list[Event]]:
    """On every rank: for each iteration of loss_and_grads, this rank's events."""
    torch.set_float32_matmul_precision("highest")
    mesh = init_device_mesh(device.type, (run.degree,), mesh_dim_names=(pipeline_parallel.AXIS,))
    params = train.make_params(pipeline_parallel, mesh, run, device)
    batch = train.make_batch(pipeline_parallel, mesh, run, 0, device)
    timelines = []
    for _ in range(warmup + iterations):
        report_phase("forward")
        dist.barrier()
        with recording(run, dist.get_rank(), device) as events:
            pipeline_parallel.loss_and_grads(params, batch, mesh, run)
        timelines.append(events)
    return timelines[warmup:]


@contextmanager
def recording(run: Run, rank: int, device: torch.device) -> Iterator[list[Event]]:
    """The events of one step on this rank, in order. On a GPU each action is waited for, lest its time be another's."""
    events: list[Event] = []
    forward = pipeline_parallel.forward
    todo = actions(gpipe(run.degree, run.microbatches), rank)
    microbatches = {kind: iter([a.microbatch for a in todo if a.kind == kind]) for kind in ("forward", "backward")}

    def timed(kind: str, microbatch: int | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter_ns()
        result = function(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize()
        events.append(Event(rank, kind, microbatch, start, time.perf_counter_ns()))
        return result

    def like_the_others(params: list[Layer], x: torch.Tensor) -> torch.Tensor:
        return forward(params, x if x.requires_grad else x.detach().requires_grad_())

    def action(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: timed(kind, next(microbatches[kind]), function, *args, **kwargs)

    def loss(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:  # part of the forward pass that comes before it
            result = timed("forward", None, function, *args)
            end = events.pop().end
            events[-1] = events[-1]._replace(end=end)
            return result

        return wrapped

    def communication(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: Waited(timed("send", None, function, *args, **kwargs))

    class Waited:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            timed("wait", None, self.work.wait)

    with ExitStack() as stack:
        for owner, name, wrap in (
            (pipeline_parallel, "forward", lambda _: action("forward", like_the_others)),
            (pipeline_parallel, "squared_error", loss),
            (torch.Tensor, "backward", lambda f: action("backward", f)),
            (dist, "isend", communication),
            (dist, "irecv", communication),
            (dist, "all_reduce", communication),
        ):
            stack.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
        yield events
