"""JAX's collectives over gloo on a rank of a lab, with the bytes that pass its interface."""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import time
from typing import Any

import torch.distributed as dist

from benchmarks.lab.namespaces import address
from benchmarks.lab.traffic import sent_bytes

CLONE_NEWUTS = 0x04000000
PORT = 29_800  # inside the namespaces


@functools.cache
def started() -> Any:
    """`benchmarks.collectives.jax`, once this rank's JAX has met the others.

    JAX's gloo listens where the name of the host leads. So this rank gets a name of its own, which is its address.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    socket.sethostname(address(dist.get_rank()))
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    import jax  # only now, as it reads these

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"{address(0)}:{PORT}", dist.get_world_size(), dist.get_rank())
    from benchmarks.collectives import jax as programs

    return programs


def collective(op: str, size: int, iterations: int) -> tuple[list[float], int]:
    """Seconds of each call of a collective over all ranks, and the bytes that this one sent in the last.

    op: as in `shardiff bench collectives`; size: payload in bytes.
    """
    import jax

    from benchmarks.collectives.timing import lengths, values

    programs, rank, ranks = started(), dist.get_rank(), dist.get_world_size()
    x = programs.on_ranks(values(rank, 0, lengths(op, size, ranks)[0]))
    run = programs.compiled(functools.partial(programs.collective, op), programs.local(x))
    taken, sent = [], 0
    for _ in range(1 + iterations):
        dist.barrier()
        before, began = sent_bytes(), time.perf_counter()
        jax.block_until_ready(run(x))
        taken.append(time.perf_counter() - began)
        dist.barrier()
        sent = sent_bytes() - before
    return taken[1:], sent
