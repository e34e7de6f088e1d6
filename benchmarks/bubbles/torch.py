"""Timelines of torch_impl.explicit.pipeline_parallel: the strategy runs as it is, and an observer takes the times.

An event costs two readings of the clock. One thing is added: the first part of the model computes the gradient of its
input as the others do, so that all do the same work, as the closed forms suppose.

More stages than cores are run on paced devices (`torch_impl.paced`): an action takes from when to when such a device
works on it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from benchmarks.documents.bubbles import Event
from benchmarks.held import kept_for_backward
from contract.schedule import Action
from contract.strategy import Run
from shardiff.ranks.rank import report_phase
from torch_impl import train
from torch_impl.compose import loss_and_grads
from torch_impl.explicit.pipeline_parallel import Observer
from torch_impl.mesh import make_mesh
from torch_impl.paced import LATE, PacedDevice
from torch_impl.passes import Passage

MOST_REPEATS = 3  # of a sample in which the CPU was late; the last one is taken as it is


def record(
    device: torch.device, run: Run, iterations: int, pace: float | None = None, warmup: int = 2
) -> tuple[list[list[Event]], int, int]:
    """On every rank: for each iteration of loss_and_grads, this rank's events; the most bytes that it kept; repeats.

    pace: operations per second of a device that is slower than the CPU; None to take the CPU's own time.
    """
    torch.set_float32_matmul_precision("highest")
    if pace is not None:
        torch.set_num_threads(1)
    mesh = make_mesh(run, device)
    params, batch = train.make_params(mesh, run, device), train.make_batch(mesh, run, 0, device)
    timelines: list[list[Event]] = []
    repeated = tries = 0
    warmup = warmup if pace is None else 1
    while len(timelines) < warmup + iterations:
        report_phase("forward")
        events: list[Event] = []
        paced = None if pace is None else PacedDevice(pace)
        beside: AbstractContextManager[object] = nullcontext() if paced is None else paced
        dist.barrier()
        start = time.perf_counter()
        with beside:
            loss_and_grads(params, batch, mesh, run, observe=observer(events, device, paced), input_grad=True)
        if paced is not None and len(timelines) >= warmup and tries < MOST_REPEATS:
            paced.synchronize()
            late = torch.tensor(paced.late / (time.perf_counter() - start))
            dist.all_reduce(late, op=dist.ReduceOp.MAX)
            if late > LATE:
                repeated, tries = repeated + 1, tries + 1
                continue
        tries = 0
        timelines.append(events)
    kept: dict[tuple[int, int], Passage] = {}
    most = kept_for_backward(
        lambda: loss_and_grads(params, batch, mesh, run, kept=kept),
        [*(p for layer in params for p in layer), *batch],
        lambda: sum(passage.put_off_bytes() for passage in kept.values()),
    )
    return timelines[warmup:], most or 0, repeated


def observer(events: list[Event], device: torch.device, paced: PacedDevice | None = None) -> Observer:
    """What notes this rank's events. On a GPU each action is waited for, lest its time be another's."""
    rank = dist.get_rank()

    @contextmanager
    def observe(kind: str, action: Action | None) -> Iterator[None]:
        start = time.perf_counter_ns()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize()
        end = time.perf_counter_ns()
        microbatch, chunk = None, 0
        if action is not None and kind == action.kind:
            microbatch, chunk = action.microbatch, action.chunk
            if paced is not None:  # the host has gone on, and the device is still at work
                start, end = (round(1e9 * seconds) for seconds in paced.span())
        events.append(Event(rank, kind, microbatch, start, end, chunk=chunk))

    return observe
