"""What a rank of the lab does: streams, single collectives, and training steps on a paced or on the real device."""

from __future__ import annotations

import functools
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
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend that sends nothing

import shardiff.mesh
from benchmarks.plan.prove.namespaces import address
from benchmarks.steps.memory import held, kept_for_backward
from contract.layout import cut, held_by, schedule_of, unit_of
from contract.problem import Layer
from contract.strategy import Run
from shardiff.ranks.torch_versions import all_gather_single, reduce_scatter_single
from shardiff.system.processes import when_parent_ends
from torch_impl import train
from torch_impl.compose import loss_and_grads
from torch_impl.mesh import Mesh
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


def collective(op: str, size: int, iterations: int, ranks: int) -> tuple[list[float], int]:
    """Seconds of each call of a collective over the first `ranks` ranks, and the bytes that this one sent in the last.

    size: payload in bytes. "collective_permute": to the next rank, receives posted first; "message": from rank 0 to
    rank 1.
    """
    rank, n, group = dist.get_rank(), ranks, first_ranks(ranks)
    x, out = torch.ones(size // 4), torch.zeros(size // 4)
    part, before_me, after_me = size // 4 // n, (rank - 1) % n, (rank + 1) % n

    def exchange(*posted: tuple[str, int]) -> None:
        works = [dist.irecv(out, peer) if way == "from" else dist.isend(x, peer) for way, peer in posted]
        for work in works:
            assert work is not None
            work.wait()

    def reduce_scatter_by_all_to_all() -> None:
        dist.all_to_all_single(out, x, group=group)
        out.view(n, -1).sum(0)

    def all_to_all_by_messages() -> None:
        peers = [peer for peer in range(n) if peer != rank]
        works = [dist.irecv(out[peer * part : (peer + 1) * part], peer) for peer in peers]
        works += [dist.isend(x[peer * part : (peer + 1) * part], peer) for peer in peers]
        out[rank * part : (rank + 1) * part] = x[rank * part : (rank + 1) * part]
        for work in works:
            assert work is not None
            work.wait()

    def reduce_scatter_by_messages() -> None:
        all_to_all_by_messages()
        out.view(n, -1).sum(0)

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "all_gather": lambda: all_gather_single(out, x[:part], group=group),
        "reduce_scatter": lambda: reduce_scatter_single(out[:part], x, group=group),
        "all_to_all": lambda: dist.all_to_all_single(out, x, group=group),
        "broadcast": lambda: dist.broadcast(x, 0, group=group),
        "collective_permute": lambda: exchange(("from", before_me), ("to", after_me)),
        "collective_permute, send first": lambda: exchange(("to", after_me), ("from", before_me)),
        "message": lambda: exchange(*([("to", 1)] if rank == 0 else [("from", 0)] if rank == 1 else [])),
        "reduce_scatter by all_to_all": reduce_scatter_by_all_to_all,
        "all_to_all by messages": all_to_all_by_messages,
        "reduce_scatter by messages": reduce_scatter_by_messages,
    }
    taken, sent = [], 0
    for _ in range(1 + iterations):
        dist.barrier()
        before, began = sent_bytes(), time.perf_counter()
        if rank < n:
            calls[op]()
        taken.append(time.perf_counter() - began)
        dist.barrier()  # what is queued has left the interface once the others have it
        sent = sent_bytes() - before
    return taken[1:], sent


@functools.cache
def first_ranks(ranks: int) -> dist.ProcessGroup | None:
    """The group of the first so many ranks; None for all of them. All ranks call it."""
    if ranks == dist.get_world_size():
        return None
    group = dist.new_group(list(range(ranks)))
    return None if isinstance(group, int) else group  # a number stands for a rank that is not in it


def steps(run: Run, paced: Paced | None, iterations: int, silent: bool = False, expected: Any = None) -> Measured:
    """Timed steps of a run, all ranks in step. silent: on groups that send nothing, for what compute alone takes.

    expected: the parameters after one step of the reference, in full; None if they are not compared.
    """
    mesh = Mesh(groups_of(run.mesh.axes, "fake" if silent else "gloo"), unit_of(run), schedule_of(run))
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
    taken, late, flagged, sent = [], [], [], 0
    for _ in range(iterations * MOST_TRIES):
        device = PacedDevice(paced.flops, paced.memory) if paced else None
        dist.barrier()
        before, began = sent_bytes(), time.perf_counter()
        with device or nullcontext():
            one_step()
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
        held(leaves, optimizer) | {"activations": kept or 0},
    )


@functools.cache
def groups_of(axes: tuple[tuple[str, int], ...], backend: str) -> dict[str, dist.ProcessGroup]:
    """The groups of this rank along the axes of a mesh. "fake" is torch's backend that sends nothing."""
    mesh, found = shardiff.mesh.Mesh(axes), {}
    for axis in mesh.names:
        found[axis], _ = dist.new_subgroups_by_enumeration([list(each) for each in mesh.groups(axis)], backend=backend)
    return found


def distance(got: list[torch.Tensor], want: list[np.ndarray]) -> float:
    """||got - want|| / ||want|| over all tensors, in float64."""
    pairs = [(a.detach().double().numpy(), b) for a, b in zip(got, want, strict=True)]
    return math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in pairs) / sum(float((b**2).sum()) for _, b in pairs))


def main(caller: Connection) -> None:
    """Meet the others, and answer until the lab is gone."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://")
    functions = {one.__name__: one for one in (ready, stream, collective, steps)}
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
