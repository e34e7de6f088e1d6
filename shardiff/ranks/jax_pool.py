"""Ranks of JAX, which stay from call to call: what of `supervisor` differs for JAX.

A rank is a fresh Python process, because XLA's threads do not survive a fork. Ranks talk over gloo (CPU) or NCCL
(GPUs), on the loopback interface only, and keep what they compiled. When the caller's end of its socket closes,
whatever the reason, a rank ends, with what it has started.

Threads: XLA sizes its one pool of CPU threads by the environment variable NPROC, else by the cores that the process may
use (xla/pjrt/cpu/cpu_client.cc, DefaultThreadPoolSize). `--xla_cpu_multi_thread_eigen=false` would only stop matrix
products from using it, and pinning a rank to a core would be more than torch's ranks get.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import IO

from shardiff.ranks import jax_rank
from shardiff.ranks.jax_rank import Start
from shardiff.ranks.messages import send
from shardiff.ranks.notes import Describe, begin_notes
from shardiff.ranks.supervisor import TIMEOUT, Workers, end, interpreter, pool
from shardiff.ranks.verdict import RankState
from shardiff.system.machine import threads as default_threads
from shardiff.system.network import held_port
from shardiff.system.processes import is_stopped, nameless_file


@contextmanager
def workers(
    world_size: int,
    device: str = "cpu",
    timeout: float = TIMEOUT,
    threads: int | None = None,
    describe: Describe | None = None,
) -> Iterator[Workers]:
    """A pool for any number of calls, each on all of its ranks. They are started without waiting, and none is left.

    jax has started when a function runs: `jax.devices()` are those of all ranks, `jax.local_devices()` the rank's one.
    What a rank writes to standard error is part of the error if it dies, and dropped otherwise.

    device: "cpu", or "cuda" for one GPU per rank. timeout: see `Workers`. threads: of XLA in each rank; by default
    OMP_NUM_THREADS, else the rank's share of the cores. describe: what a rank notes of a program that it runs, given
    the program's HLO text, as (payload bytes, its collectives in words); importable by ranks. Passed in, because ranks
    know processes only, and nothing of HLO.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; known: cpu, cuda")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    interpreters = Interpreters(world_size, device, threads or default_threads(world_size), describe)
    with pool(interpreters, world_size, timeout) as ranks:
        yield ranks


@dataclass
class Interpreter(RankState):
    """A rank as the caller knows it."""

    _: KW_ONLY
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]

    def written(self) -> str:
        """The end of what the rank wrote to standard error."""
        self.stderr.seek(0)
        return "\n".join(self.stderr.read().decode(errors="replace").splitlines()[-40:])


class Interpreters:
    """Ranks that are interpreters of their own, and stay until one fails."""

    stay = True

    def __init__(self, world_size: int, device: str, threads: int, describe: Describe | None) -> None:
        self.world_size, self.device, self.threads, self.describe = world_size, device, threads, describe
        self.stack = ExitStack()
        self.ranks: list[Interpreter] = []  # none after a failure

    def open(self, timeout: float) -> None:
        self.notes = nameless_file(self.stack)
        begin_notes(self.notes, self.world_size)
        port = self.stack.enter_context(held_port())
        # What ranks write into files for a while, as jax's profiler does, goes with the pool or with the last rank.
        directory = tempfile.TemporaryDirectory(prefix="shardiff-", ignore_cleanup_errors=True)
        folder = self.stack.enter_context(directory)
        for rank in range(self.world_size):
            start = Start(rank, self.world_size, port, self.device, timeout, self.notes, folder, self.describe)
            variables = environment(self.device, self.threads, folder)
            self.ranks.append(self.stack.enter_context(_started(start, variables)))

    def begin(self, count: int, module: str | None, timeout: float, stack: ExitStack) -> tuple[list[RankState], Path]:
        if count != self.world_size:
            raise ValueError(f"JAX's ranks are joined for good: a pool of {self.world_size} cannot run {count}")
        if not self.ranks:
            self.close()
            self.open(timeout)
        for rank in self.ranks:
            rank.done, rank.result = False, None
        return list(self.ranks), self.notes

    def settle(self, ranks: Sequence[RankState], timeout: float, given_up: bool = False) -> None:
        if all(rank.done for rank in ranks) and not given_up:
            return
        failed = any(rank.gone or rank.error for rank in ranks)
        for rank in self.ranks:
            rank.state = "stopped" if is_stopped(rank.pid) else None
            if not (failed or given_up or rank.done or rank.stack) and rank.state is None:
                rank.process.send_signal(signal.SIGABRT)  # at which it writes its stack to standard error
                time.sleep(0.3)
                rank.stack = rank.written()
        for rank in self.ranks:
            code = end(rank.process)
            if rank.gone:
                rank.state, rank.last_words = code, rank.written()
        self.ranks = []

    def close(self) -> None:
        self.ranks = []
        self.stack.close()


def environment(device: str, threads: int, directory: str) -> Mapping[str, str]:
    """The environment variables of a rank: this process's, and what XLA must know before it starts."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {
        **kept,  # a proxy would be asked for the way to the loopback interface
        "NPROC": str(threads),
        "JAX_PLATFORMS": "cpu" if device == "cpu" else "cuda,cpu",
        "TF_CPP_MIN_LOG_LEVEL": kept.get("TF_CPP_MIN_LOG_LEVEL", "3"),
        "TMPDIR": directory,
        "XLA_PYTHON_CLIENT_PREALLOCATE": kept.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
    }


@contextmanager
def _started(start: Start, variables: Mapping[str, str]) -> Iterator[Interpreter]:
    """One rank's process, ended with the block."""
    with ExitStack() as stack, open(nameless_file(stack), "w+b") as stderr:
        process, sock = interpreter(jax_rank.__name__, "be_rank", variables, stderr)
        try:
            with sock:
                send(sock, start)
                yield Interpreter(start.rank, start.world_size, sock, process.pid, process=process, stderr=stderr)
        finally:
            if process.returncode is None:  # not ended yet
                end(process)
