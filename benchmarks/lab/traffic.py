"""What ranks of a lab send: plain streams, and single collectives, with the bytes that pass their interfaces."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.lab.namespaces import address
from shardiff.ranks.torch_versions import all_gather_single, reduce_scatter_single

STREAM_PORT = 29700  # inside the namespaces
LATER = 0.01  # seconds


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


def collective(op: str, size: int, iterations: int, ranks: int, alone: bool = False) -> tuple[list[float], int]:
    """Seconds of each call of a collective over so many ranks, and the bytes that this one sent in the last.

    All ranks call it at once, in groups of so many, each on as many hosts as possible. size: payload in bytes. alone:
    only the group of rank 0 does, its last rank later than the others, and time counts from then: in a step no two
    ranks are ready at the same moment, and gloo's all_gather is faster if they are.
    "collective_permute": to the next rank, receives posted first; "message": from the first rank to the second.
    """
    n, members, group = ranks, ranks_of(ranks), group_of(ranks)
    rank = members.index(dist.get_rank())
    x, out = torch.ones(size // 4), torch.zeros(size // 4)
    part, before_me, after_me = size // 4 // n, (rank - 1) % n, (rank + 1) % n

    def exchange(*posted: tuple[str, int]) -> None:
        works = [
            dist.irecv(out, members[peer]) if way == "from" else dist.isend(x, members[peer]) for way, peer in posted
        ]
        for work in works:
            assert work is not None
            work.wait()

    def reduce_scatter_by_all_to_all() -> None:
        dist.all_to_all_single(out, x, group=group)
        out.view(n, -1).sum(0)

    def all_to_all_by_messages() -> None:
        peers = [peer for peer in range(n) if peer != rank]
        works = [dist.irecv(out[peer * part : (peer + 1) * part], members[peer]) for peer in peers]
        works += [dist.isend(x[peer * part : (peer + 1) * part], members[peer]) for peer in peers]
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
        "broadcast": lambda: dist.broadcast(x, members[0], group=group),
        "reduce": lambda: dist.reduce(x, members[0], group=group),
        "gather": lambda: dist.gather(x[:part], list(out.chunk(n)) if rank == 0 else None, members[0], group=group),
        "scatter": lambda: dist.scatter(out[:part], list(x.chunk(n)) if rank == 0 else None, members[0], group=group),
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
        before, began = sent_bytes(), time.perf_counter() + alone * LATER
        if alone and rank == n - 1:
            time.sleep(LATER)
        if not alone or members[0] == 0:
            calls[op]()
        taken.append(time.perf_counter() - began)
        dist.barrier()  # what is queued has left the interface once the others have it
        sent = sent_bytes() - before
    return taken[1:], sent


def ranks_of(number: int) -> list[int]:
    """The ranks of this rank's group of so many, which are as far apart as they can be."""
    apart = dist.get_world_size() // number
    return list(range(dist.get_rank() % apart, dist.get_world_size(), apart))


@functools.cache
def group_of(number: int) -> dist.ProcessGroup | None:
    """The group of these ranks; None for all of them. All ranks call it, and their number divides by `number`."""
    ranks, apart = dist.get_world_size(), dist.get_world_size() // number
    if apart == 1:
        return None
    mine, _ = dist.new_subgroups_by_enumeration([list(range(first, ranks, apart)) for first in range(apart)])
    assert isinstance(mine, dist.ProcessGroup)
    return mine
