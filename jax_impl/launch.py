"""Run a function in N rank processes of JAX, which talk over gloo (CPU) or NCCL (GPUs). Loopback only.

A rank is a fresh Python process, because XLA's threads do not survive a fork. It imports the function's module, never
the caller's `__main__`. Messages are pickles over a socket pair; when the caller's end closes, whatever the reason, the
rank ends. So does every rank when one fails, and the error begins with the traceback of the rank that failed first.

Threads: XLA sizes its one pool of CPU threads by the environment variable NPROC, else by the cores that the process may
use (xla/pjrt/cpu/cpu_client.cc, DefaultThreadPoolSize). `--xla_cpu_multi_thread_eigen=false` would only stop matrix
products from using it, and pinning a rank to a core would be more than torch's ranks get.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any

SECONDARY = ("loo", "onnection", "oordination", "distributed service", "NCCL")  # in errors another rank may have caused
SETTLE, GRACE = 0.3, 5.0  # seconds that others have to fail too: after an error of a rank's own; after a secondary one


class WorkerError(RuntimeError):
    """A rank has failed; the message begins with that rank and its own traceback.

    kind: "raised", "died" (its process ended) or "stuck" (no result in time). phase: "start-up" or "call".
    """

    def __init__(self, message: str, rank: int, phase: str = "", kind: str = "died", traceback: str = ""):
        super().__init__(message)
        self.rank, self.phase, self.kind, self.traceback = rank, phase, kind, traceback


def run_on_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    device: str = "cpu",
    timeout: float = 300,
    threads: int | None = None,
) -> list[Any]:
    """function(*args) in `world_size` processes of one device each, as a list by rank: `Workers.call` in a pool."""
    with workers(world_size, device, timeout, threads) as pool:
        return pool.call(function, *args)


@contextmanager
def workers(
    world_size: int, device: str = "cpu", timeout: float = 300, threads: int | None = None
) -> Iterator[Workers]:
    """Rank processes for any number of calls. They are started without waiting, and none is left behind.

    device: "cpu", or "cuda" for one GPU per rank. timeout: seconds that a call may take, the first with the start.
    threads: of XLA in each rank; by default OMP_NUM_THREADS, else the rank's share of the cores.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; known: cpu, cuda")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    threads = threads or int(os.environ.get("OMP_NUM_THREADS") or max(1, num_cores() // world_size))
    with ExitStack() as stack:
        port = stack.enter_context(held_port())
        ranks = [stack.enter_context(_process(rank, world_size, port, device, threads)) for rank in range(world_size)]
        yield Workers(ranks, timeout)


@dataclass
class _Rank:
    """A rank as the caller knows it."""

    rank: int
    world_size: int
    process: subprocess.Popen[bytes]
    messages: Connection
    stderr: IO[bytes]
    phase: str = "start-up"
    done: bool = False
    result: Any = None
    failed_at: float | None = None  # time.monotonic(), one clock for all processes
    error: str = ""
    secondary: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


@dataclass
class Workers:
    """A pool; see `workers`."""

    ranks: list[_Rank]
    timeout: float

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(*args) in every rank at once, as a list by rank. Ranks keep what they compiled from call to call.

        The function must be importable by module and name, arguments and results must be picklable. jax is started
        when it runs: `jax.devices()` are those of all ranks, `jax.local_devices()` the rank's one.
        Raises WorkerError if a rank fails; then the pool is of no more use. What a rank writes to standard error is
        part of the error if it dies, and dropped otherwise.
        """
        payload = pickle.dumps((_importable(function), args), 5)
        for rank in self.ranks:
            rank.done, rank.result = False, None
            with suppress(OSError):  # a rank that is gone is found below
                rank.messages.send_bytes(payload)
        deadline = time.monotonic() + self.timeout
        end = deadline
        while not all(rank.done for rank in self.ranks) and (left := end - time.monotonic()) > 0:
            waiting = [rank.messages for rank in self.ranks if not rank.done and rank.failed_at is None]
            for ready in wait(waiting, left) if waiting else ():
                self._receive(next(rank for rank in self.ranks if rank.messages is ready))
            if failed := [rank for rank in self.ranks if rank.failed_at is not None]:
                end = min(end, time.monotonic() + (GRACE if all(rank.secondary for rank in failed) else SETTLE))
                if not waiting:
                    break
        if not all(rank.done for rank in self.ranks):
            raise self._verdict()
        return [rank.result for rank in self.ranks]

    def _receive(self, rank: _Rank) -> None:
        try:
            kind, *content = rank.messages.recv()
        except (EOFError, OSError):
            rank.failed_at = time.monotonic()
            return
        if kind == "started":
            rank.phase = "call"
        elif kind == "result":
            rank.done, (rank.result,) = True, content
        else:
            rank.failed_at, rank.error, rank.secondary = content

    def _verdict(self) -> WorkerError:
        """Who failed first by its own fault, and how. All ranks are ended."""
        failed = [rank for rank in self.ranks if rank.failed_at is not None]
        for rank in self.ranks:
            if not failed and not rank.done:
                rank.process.send_signal(signal.SIGABRT)  # at which it writes its stack to standard error
        for rank in self.ranks:
            with suppress(subprocess.TimeoutExpired):
                if not rank.done and not rank.error:
                    rank.process.wait(2)
            rank.process.kill()
        late = next(rank for rank in self.ranks if not rank.done)
        first = min(failed, key=lambda rank: (rank.secondary, rank.failed_at), default=late)
        trace, ending = first.error or _written(first), _ending(first.process.wait())
        if first.error:
            kind, how = "raised", f"{first} raised in phase {first.phase}:"
        elif failed:
            kind, how = "died", f"{first} died in phase {first.phase}: {ending}"
        else:
            kind, how = "stuck", f"{first} is stuck in phase {first.phase}: no result for {self.timeout:g} s"
        lines = [how, *(["", trace.rstrip(), ""] if trace else [])]
        for rank in failed:
            if rank is not first:
                last = rank.error.rstrip().splitlines()[-1] if rank.error else ""
                lines.append(f"{rank} raised {last}" if last else f"{rank} died: {_ending(rank.process.wait())}")
        return WorkerError("\n".join(lines), first.rank, first.phase, kind, trace)


@contextmanager
def _process(rank: int, world_size: int, port: int, device: str, threads: int) -> Iterator[_Rank]:
    """One rank's process, ended with the block."""
    path = f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}"
    run = f"from {__name__} import _run; _run({rank}, {world_size}, {port}, {device!r})"
    command = [sys.executable, "-c", f"{path}; {run}"]
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    env = {
        **kept,  # a proxy would be asked for the way to the loopback interface
        "NPROC": str(threads),
        "JAX_PLATFORMS": "cpu" if device == "cpu" else "cuda,cpu",
        "TF_CPP_MIN_LOG_LEVEL": kept.get("TF_CPP_MIN_LOG_LEVEL", "3"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": kept.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
    }
    ours, theirs = Pipe()
    with ours, tempfile.TemporaryFile() as stderr:
        with theirs:  # a session of its own, so that Ctrl-C reaches only the caller, which ends the others
            fd = theirs.fileno()
            process = subprocess.Popen(command, stdin=fd, stderr=stderr, env=env, start_new_session=True)
        try:
            yield _Rank(rank, world_size, process, ours, stderr)
        finally:
            process.kill()
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


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _importable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under the name by which ranks can import it: `python -m` calls its module __main__."""
    if getattr(function, "__module__", None) != "__main__":
        return function
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        raise ValueError(f"{function.__qualname__} is defined in the script that runs; ranks need it in a module")
    return getattr(importlib.import_module(spec.name), function.__qualname__)


def _written(rank: _Rank) -> str:
    """The end of what a rank wrote to standard error."""
    rank.stderr.seek(0)
    return "\n".join(rank.stderr.read().decode(errors="replace").splitlines()[-40:])


def _ending(status: int) -> str:
    if status == -signal.SIGKILL:
        return "killed by SIGKILL, perhaps for lack of memory"
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"it exited with status {status}"


def _run(rank: int, world_size: int, port: int, device: str) -> None:
    """A rank's process: start jax, then run what the caller sends until it is gone."""
    messages = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    sys.stdout = open(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # gloo prints to standard output that its ranks are connected
    faulthandler.enable(all_threads=False)
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(messages, jobs), daemon=True).start()
    try:
        _start_jax(rank, world_size, port, device)
        messages.send(("started",))
        while True:
            function, args = pickle.loads(jobs.get())
            messages.send(("result", function(*args)))
            del function, args
    except BaseException as error:
        frames = error.__traceback__ and error.__traceback__.tb_next or error.__traceback__
        text = "".join(traceback.format_exception(type(error), error, frames))
        secondary = isinstance(error, RuntimeError) and any(sign in str(error) for sign in SECONDARY)
        messages.send(("error", time.monotonic(), text, secondary))
        threading.Event().wait()  # the caller ends it


def _listen(messages: Connection, jobs: queue.SimpleQueue[bytes]) -> None:
    with suppress(EOFError, OSError):
        while True:
            jobs.put(messages.recv_bytes())
    os._exit(1)


def _start_jax(rank: int, world_size: int, port: int, device: str) -> None:
    """Join the other ranks, with one device."""
    from jax_impl import devices

    for name in {"lo", "lo0"}.intersection(name for _, name in socket.if_nameindex()):
        os.environ["NCCL_SOCKET_IFNAME"] = name
    with devices.quiet_stderr():
        import jax

        with suppress(ImportError, AttributeError):  # gloo listens at the host's name, and jax has no option for it
            lib = importlib.import_module("jax._src.lib")._jax
            lib.make_gloo_tcp_collectives = functools.partial(lib.make_gloo_tcp_collectives, hostname="127.0.0.1")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        here = f"127.0.0.1:{port}"
        jax.distributed.initialize(
            here,
            world_size,
            rank,
            local_device_ids=[rank] if device == "cuda" else None,
            cluster_detection_method="deactivate",
            coordinator_bind_address=here,
        )
    devices.prepare(1, device)
