"""Timelines of torch_impl.explicit.pipeline_parallel: the strategy runs as it is, and an observer takes the times.

An event costs two readings of the clock. One thing is added: the first stage computes the gradient of its input as the
others do, so that all stages do the same work, as (p - 1) / (m + p - 1) supposes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from benchmarks.documents.bubbles import Event
from contract.schedule import Action
from contract.strategy import Run
from shardiff.ranks.rank import report_phase
from torch_impl import train
from torch_impl.compose import loss_and_grads
from torch_impl.explicit.pipeline_parallel import Observer
from torch_impl.mesh import make_mesh


def record(device: torch.device, run: Run, iterations: int, warmup: int = 2) -> list[list[Event]]:
    """On every rank: for each iteration of loss_and_grads, this rank's events."""
    torch.set_float32_matmul_precision("highest")
    mesh = make_mesh(run, device)
    params, batch = train.make_params(mesh, run, device), train.make_batch(mesh, run, 0, device)
    timelines: list[list[Event]] = []
    for _ in range(warmup + iterations):
        report_phase("forward")
        timelines.append([])
        dist.barrier()
        loss_and_grads(params, batch, mesh, run, observe=observer(timelines[-1], device), input_grad=True)
    return timelines[warmup:]


def observer(events: list[Event], device: torch.device) -> Observer:
    """What notes this rank's events. On a GPU each action is waited for, lest its time be another's."""
    rank = dist.get_rank()

    @contextmanager
    def observe(kind: str, action: Action | None) -> Iterator[None]:
        start = time.perf_counter_ns()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize()
        microbatch = action.microbatch if action is not None and kind == action.kind else None
        events.append(Event(rank, kind, microbatch, start, time.perf_counter_ns()))

    return observe
