"""Run a function in N rank processes of JAX, which talk over gloo (CPU) or NCCL (GPUs). Loopback only.

A rank is a fresh Python process, because XLA's threads do not survive a fork. It imports the function's module, never
the caller's `__main__`. When the caller's end of its socket closes, whatever the reason, the rank ends, with what it
has started. So does every rank when one fails, and the error begins with the traceback of the rank that failed first.

Threads: XLA sizes its one pool of CPU threads by the environment variable NPROC, else by the cores that the process may
use (xla/pjrt/cpu/cpu_client.cc, DefaultThreadPoolSize). `--xla_cpu_multi_thread_eigen=false` would only stop matrix
products from using it, and pinning a rank to a core would be more than torch's ranks get.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from shardiff.ranks import jax_rank as worker
from shardiff.ranks.jax_rank import report_phase
from shardiff.ranks.processes import (
    KEEP_FREED,
    WorkerError,
    begin_notes,
    importable,
    is_stopped,
    nameless_file,
    num_cores,
)
from shardiff.ranks.watch import RankState, send, verdict, watch

__all__ = ["WorkerError", "Workers", "held_port", "num_cores", "report_phase", "run_on_ranks", "workers"]

TIMEOUT = 30.0  # seconds of silence until ranks are stuck


def run_on_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    device: str = "cpu",
    timeout: float = TIMEOUT,
    threads: int | None = None,
) -> list[Any]:
    """function(*args) in `world_size` processes of one device each, as a list by rank: `Workers.call` in a pool."""
    with workers(world_size, device, timeout, threads) as pool:
        return pool.call(function, *args)


@contextmanager
def workers(
    world_size: int, device: str = "cpu", timeout: float = TIMEOUT, threads: int | None = None
) -> Iterator[Workers]:
    """Rank processes for any number of calls. They are started without waiting, and none is left behind.

    device: "cpu", or "cuda" for one GPU per rank. timeout: seconds without a sign of life (a phase, a result) from any
    rank until a call is stuck; ten times as many while ranks compute, compile or read. threads: of XLA in each rank; by
    default OMP_NUM_THREADS, else the rank's share of the cores.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; known: cpu, cuda")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    threads = threads or int(os.environ.get("OMP_NUM_THREADS") or max(1, num_cores() // world_size))
    with ExitStack() as stack:
        notes = nameless_file(stack)
        begin_notes(notes, world_size)
        port = stack.enter_context(held_port())
        # What ranks write into files for a while, as jax's profiler does, goes with the pool or with the last rank.
        directory = tempfile.TemporaryDirectory(prefix="shardiff-", ignore_cleanup_errors=True)
        start = worker.Start(world_size, port, device, threads, timeout, notes, stack.enter_context(directory))
        ranks = [stack.enter_context(_process(rank, start)) for rank in range(world_size)]
        yield Workers(ranks, timeout, notes)


@dataclass
class Rank(RankState):
    """A rank as the caller knows it."""

    _: KW_ONLY
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]


@dataclass
class Workers:
    """A pool; see `workers`. `timeout` may be changed between calls."""

    ranks: list[Rank]
    timeout: float
    notes: Path

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(*args) in every rank at once, as a list by rank. Ranks keep what they compiled from call to call.

        The function must be importable by module and name, arguments and results must be picklable. jax is started
        when it runs: `jax.devices()` are those of all ranks, `jax.local_devices()` the rank's one.
        Raises WorkerError if a rank fails; then the pool is of no more use. What a rank writes to standard error is
        part of the error if it dies, and dropped otherwise.
        """
        payload = pickle.dumps((importable(function), args), 5)
        for rank in self.ranks:
            rank.done, rank.result = False, None
            rank.socket.settimeout(self.timeout)
            with suppress(OSError):  # a rank that is gone or stopped is found below
                send(rank.socket, payload)
        watch(list(self.ranks), self.notes, self.timeout, stay=True)
        if not all(rank.done for rank in self.ranks):
            raise self._verdict()
        return [rank.result for rank in self.ranks]

    def _verdict(self) -> WorkerError:
        """Who failed first by its own fault, and how. All ranks are ended."""
        failed = any(rank.gone or rank.error for rank in self.ranks)
        for rank in self.ranks:
            rank.state = "stopped" if is_stopped(rank.pid) else None
            if not failed and not rank.done and not rank.stack and rank.state is None:
                rank.process.send_signal(signal.SIGABRT)  # at which it writes its stack to standard error
                time.sleep(0.3)
                rank.stack = _written(rank)
        for rank in self.ranks:
            _end(rank.process)
            if rank.gone:
                rank.state, rank.last_words = rank.process.returncode, _written(rank)
        error = verdict(list(self.ranks), self.notes, self.timeout)
        assert error is not None
        return error


@contextmanager
def _process(rank: int, start: worker.Start) -> Iterator[Rank]:
    """One rank's process, ended with the block."""
    path = f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}"
    run = f"from {worker.__name__} import Start, run; from pathlib import {type(start.notes).__name__}"
    command = [sys.executable, "-c", f"{path}; {run}; run({rank}, {start!r})"]
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    env = {
        "GLIBC_TUNABLES": KEEP_FREED,
        **kept,  # a proxy would be asked for the way to the loopback interface
        "NPROC": str(start.threads),
        "JAX_PLATFORMS": "cpu" if start.device == "cpu" else "cuda,cpu",
        "TF_CPP_MIN_LOG_LEVEL": kept.get("TF_CPP_MIN_LOG_LEVEL", "3"),
        "TMPDIR": start.directory,
        "XLA_PYTHON_CLIENT_PREALLOCATE": kept.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
    }
    ours, theirs = socket.socketpair()
    with ours, ExitStack() as stack, open(nameless_file(stack), "w+b") as stderr:
        with theirs:  # a session of its own, so that Ctrl-C reaches only the caller, which ends the others
            fd = theirs.fileno()
            process = subprocess.Popen(command, stdin=fd, stderr=stderr, env=env, start_new_session=True)
        try:
            yield Rank(rank, start.world_size, ours, process.pid, process=process, stderr=stderr)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a rank, and what it has started."""
    if process.returncode is not None:
        return
    started: list[psutil.Process] = []
    with suppress(psutil.Error):
        started = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for other in started:  # in a session of its own
        with suppress(psutil.Error):
            other.kill()
    process.wait()


@contextmanager
def held_port() -> Iterator[int]:
    """A port of the loopback interface that nobody else is given while the block runs.

    gRPC binds with SO_REUSEPORT, so two coordinators on one port would not fail but mix up their ranks. A socket that
    is bound with it and never listens keeps the port from all who ask for a free one, and lets gRPC have it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _written(rank: Rank) -> str:
    """The end of what a rank wrote to standard error."""
    rank.stderr.seek(0)
    return "\n".join(rank.stderr.read().decode(errors="replace").splitlines()[-40:])
