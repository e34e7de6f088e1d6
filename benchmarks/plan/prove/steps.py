"""Training steps on a rank of a lab, on a paced or on the real device."""

from __future__ import annotations

import functools
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import shardiff.mesh
from benchmarks.lab.traffic import sent_bytes
from benchmarks.memory_torch import held, kept_for_backward
from benchmarks.silent import SILENT
from contract.layout import cut, held_by, schedule_of, unit_of
from contract.problem import Layer
from contract.strategy import Run
from torch_impl import train
from torch_impl.compose import loss_and_grads
from torch_impl.mesh import Mesh
from torch_impl.paced import LATE, PacedDevice

CPU = torch.device("cpu")
MOST_TRIES, MOST_REAL_TRIES = 3, 10  # for every sample that was disturbed; a step in real time is short
MOST_DELAYED = 0.03  # of a step


class Paced(NamedTuple):
    """A device of a stated rate: flops/s of products, bytes/s of the update."""

    flops: float
    memory: float


class Measured(NamedTuple):
    """One rank's steps. seconds: of each. flagged: whether a paced device of some rank was ahead of its CPU, or a rank
    was ready to run and did not, for more of a step than MOST_DELAYED: others had the core. sent: bytes on the
    interface in the last step. loss: before the first step; difference: of this rank's shards after it to those of the
    reference, relative. held: bytes by kind."""

    seconds: list[float]
    flagged: list[bool]
    sent: int
    loss: float
    difference: float
    held: dict[str, int]


def steps(run: Run, paced: Paced | None, iterations: int, silent: bool = False, expected: Any = None) -> Measured:
    """Timed steps of a run, all ranks in step. silent: on groups that send nothing, for what compute alone takes.

    expected: the parameters after one step of the reference, in full; None if they are not compared.
    """
    mesh = Mesh(groups_of(run.mesh.axes, SILENT if silent else "gloo"), unit_of(run), schedule_of(run))
    params = train.make_params(mesh, run, CPU)
    optimizer, leaves = train.make_optimizer(params, run), [p for layer in params for p in layer]
    batch = train.make_batch(mesh, run, 0, CPU)

    def one_step() -> torch.Tensor:
        loss, grads = loss_and_grads(params, batch, mesh, run)
        train.update(optimizer, params, grads)
        return loss

    loss = one_step().item()
    difference = math.nan
    if expected is not None:
        wanted = cut([Layer(*layer) for layer in expected], held_by(run, dist.get_rank()))
        difference = distance(leaves, [a for layer in wanted for a in layer])
    kept = kept_for_backward(one_step, [*leaves, *batch])
    taken, flagged, sent = [], [], 0
    for _ in range(iterations * (MOST_TRIES if paced else MOST_REAL_TRIES)):
        device = PacedDevice(paced.flops, paced.memory) if paced else None
        dist.barrier()
        before, waited, began = sent_bytes(), kept_waiting(), time.perf_counter()
        with device or nullcontext():
            one_step()
        if device:
            device.synchronize()
        seconds = time.perf_counter() - began
        late = device.late / seconds > LATE if device else False
        disturbed = torch.tensor(float(late or (kept_waiting() - waited) / seconds > MOST_DELAYED))
        dist.all_reduce(disturbed, dist.ReduceOp.MAX)
        sent = sent_bytes() - before  # after that sum, so that nothing is queued
        taken.append(seconds)
        flagged.append(bool(disturbed.item()))
        if flagged.count(False) == iterations:
            break
    return Measured(
        taken,
        flagged,
        sent,
        loss,
        difference,
        held(leaves, optimizer) | {"activations": kept or 0},
    )


def kept_waiting() -> float:
    """Seconds that this thread was ready to run and another one had its core, since it started."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@functools.cache
def groups_of(axes: tuple[tuple[str, int], ...], backend: str) -> dict[str, dist.ProcessGroup]:
    """The groups of this rank along the axes of a mesh."""
    mesh, found = shardiff.mesh.Mesh(axes), {}
    for axis in mesh.names:
        found[axis], _ = dist.new_subgroups_by_enumeration([list(each) for each in mesh.groups(axis)], backend=backend)
    return found


def distance(got: list[torch.Tensor], want: list[np.ndarray]) -> float:
    """||got - want|| / ||want|| over all tensors, in float64."""
    pairs = [(a.detach().double().numpy(), b) for a, b in zip(got, want, strict=True)]
    return math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in pairs) / sum(float((b**2).sum()) for _, b in pairs))
