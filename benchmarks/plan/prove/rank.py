"""What a rank of the lab does: streams, single collectives, and training steps on a paced or on the real device."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.plan.prove.namespaces import address
from benchmarks.steps import peers
from benchmarks.steps.memory import held, kept_for_backward
from benchmarks.steps.torch import silent_device_mesh
from contract.layout import cut, held_by
from contract.problem import Layer
from contract.strategy import Run
from shardiff.ranks.torch_versions import all_gather_single, reduce_scatter_single
from shardiff.system.processes import when_parent_ends
from torch_impl import train
from torch_impl.mesh import make_device_mesh, of_device_mesh
from torch_impl.paced import LATE, PacedDevice

CPU = torch.device("cpu")
STREAM_PORT = 29700
MOST_TRIES = 3  # for every sample in which the CPU fell behind


class Paced(NamedTuple):
    """A device of a stated rate: flops/s of products, bytes/s of the update."""

    flops: float
    memory: float


class Measured(NamedTuple):
    """One rank's steps. seconds, late: of each step; flagged: whether the CPU of some rank was late. sent: bytes on the
    interface in the last step. loss: before the first step; difference: of this rank's shards after it to those of the
    reference, relative. held: bytes by kind."""

    seconds: list[float]
    late: list[float]
    flagged: list[bool]
    sent: int
    loss: float
    difference: float
    held: dict[str, int]


def ready() -> int:
    """This rank's number, once all have met."""
    dist.barrier()
    return dist.get_rank()


def sent_bytes() -> int:
    """Bytes that have left this rank's interface so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


def stream(size: int, source: int, target: int) -> float:
    """Seconds in which `size` bytes go from one rank to another over a plain TCP connection; 0 on the other ranks."""
    rank, taken = dist.get_rank(), 0.0
    dist.barrier()
    if rank == target:
        with socket.create_server((address(rank), STREAM_PORT)) as server:
            dist.barrier()
            connection, _ = server.accept()
            with connection:
                left, began = size, 0.0
                while left:
                    left -= len(connection.recv(1 << 20))
                    began = began or time.perf_counter()
                taken = time.perf_counter() - began
    else:
        dist.barrier()
        if rank == source:
            with socket.create_connection((address(target), STREAM_PORT), timeout=30) as connection:
                connection.sendall(bytes(size))
    dist.barrier()
    return taken


def collective(op: str, size: int, iterations: int) -> tuple[list[float], int]:
    """Seconds of each call of a collective over all ranks, and the bytes that this rank sent in the last one.

    size: payload in bytes. "collective_permute": to the next rank, receives posted first; "message": from rank 0 to
    rank 1.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    x, out = torch.ones(size // 4), torch.zeros(size // 4)
    part = size // 4 // n

    def to(sources: list[int], targets: list[int]) -> None:
        works = [dist.irecv(out, source) for source in sources]
        works += [dist.isend(x, target) for target in targets]
        for work in works:
            assert work is not None
            work.wait()

    def by_all_to_all() -> None:
        dist.all_to_all_single(out, x)
        out.view(n, -1).sum(0)

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: all_gather_single(out, x[:part]),
        "reduce_scatter": lambda: reduce_scatter_single(out[:part], x),
        "reduce_scatter by all_to_all": by_all_to_all,
        "all_to_all": lambda: dist.all_to_all_single(out, x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "collective_permute": lambda: to([(rank - 1) % n], [(rank + 1) % n]),
        "collective_permute, send first": lambda: _send_first(x, out),
        "message": lambda: to([0] if rank == 1 else [], [1] if rank == 0 else []),
    }
    taken, sent = [], 0
    for _ in range(1 + iterations):
        dist.barrier()
        before, began = sent_bytes(), time.perf_counter()
        calls[op]()
        taken.append(time.perf_counter() - began)
        dist.barrier()  # what is queued has left the interface once the others have it
        sent = sent_bytes() - before
    return taken[1:], sent


def _send_first(x: torch.Tensor, out: torch.Tensor) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    sends = dist.isend(x, (rank + 1) % n)
    receives = dist.irecv(out, (rank - 1) % n)
    for work in (sends, receives):
        assert work is not None
        work.wait()


def steps(run: Run, paced: Paced | None, iterations: int, silent: bool = False, expected: Any = None) -> Measured:
    """Timed steps of a run, all ranks in step. silent: on groups that send nothing, for what compute alone takes.

    expected: the parameters after one step of the reference, in full; None if they are not compared.
    """
    mesh = silent_device_mesh(run, CPU) if silent else make_device_mesh(run, CPU)
    contestant = peers.explicit(mesh, run, CPU)
    batch = train.make_batch(of_device_mesh(mesh, run), run, 0, CPU)
    loss = contestant.step(batch).item()
    difference = math.nan
    if expected is not None:
        wanted = cut([Layer(*layer) for layer in expected], held_by(run, dist.get_rank()))
        difference = distance(contestant.leaves, [a for layer in wanted for a in layer])
    kept = kept_for_backward(lambda: contestant.step(batch), [*contestant.leaves, *batch])
    taken, late, flagged, sent = [], [], [], 0
    for _ in range(iterations * MOST_TRIES):
        device = PacedDevice(paced.flops, paced.memory) if paced else None
        dist.barrier()
        before, began = sent_bytes(), time.perf_counter()
        with device or nullcontext():
            contestant.step(batch)
        if device:
            device.synchronize()
        seconds = time.perf_counter() - began
        behind = torch.tensor(device.late / seconds if device else 0.0)
        dist.all_reduce(behind, dist.ReduceOp.MAX)
        sent = sent_bytes() - before  # after that sum, so that nothing is queued
        taken.append(seconds)
        late.append(device.late if device else 0.0)
        flagged.append(behind.item() > LATE)
        if flagged.count(False) == iterations:
            break
    return Measured(
        taken,
        late,
        flagged,
        sent,
        loss,
        difference,
        held(contestant.leaves, contestant.optimizer) | {"activations": kept or 0},
    )


def distance(got: list[torch.Tensor], want: list[np.ndarray]) -> float:
    """||got - want|| / ||want|| over all tensors, in float64."""
    pairs = [(a.detach().double().numpy(), b) for a, b in zip(got, want, strict=True)]
    return math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in pairs) / sum(float((b**2).sum()) for _, b in pairs))


def product_rate(rows: int, width: int, iterations: int) -> float:
    """flops/s of X[rows, width] @ W[width, width] on this rank's core, while all ranks do the same."""
    x, w = torch.randn(rows, width), torch.randn(width, width)
    times = []
    for _ in range(2 + iterations):
        began = time.perf_counter()
        torch.mm(x, w)
        times.append(time.perf_counter() - began)
    return 2 * rows * width * width / median(times[2:])


def main(caller: Connection) -> None:
    """Meet the others, and answer until the lab is gone."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://")
    functions = {one.__name__: one for one in (ready, stream, collective, steps, product_rate)}
    while True:
        try:
            name, args = caller.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = "done", functions[name](*args)
        except Exception:
            answer = "error", traceback.format_exc(limit=-3)
        caller.send(answer)


if __name__ == "__main__":
    from benchmarks.plan.prove import rank as itself  # what it answers with is to be unpickled elsewhere

    when_parent_ends(signal.SIGKILL)
    itself.main(Connection(int(sys.argv[1])))
