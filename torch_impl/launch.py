"""Worker processes, one per rank: start, watch, collect errors, end.

A pool is one process, the starter, that imports torch once and forks the ranks of every call:

    caller ------- control socket ------- starter
      |                                      | fork, wait, kill
      +-------- a socket per rank -------- rank 0 .. n-1, each for one call

Fresh ranks cost milliseconds, and nothing of one call, above all none of its failures, reaches the next. The starter is
a new interpreter: the caller's __main__ is not run again, and nothing that it has started (JAX, threads, CUDA) is
forked. Ranks meet through a file in a private directory and talk over the loopback interface only; with CUDA, rank r
has GPU r and NCCL.

A dead process is noticed by the end of file on its sockets: the caller names the rank that died and ends the others,
the starter ends the ranks when the caller is gone, a rank ends when the caller or the starter is gone. Phases are noted
in shared memory, so that the phase of a rank that was killed or stopped is known too.
"""

from __future__ import annotations

import atexit
import importlib
import math
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch_impl import worker
from torch_impl.worker import MAX_RANKS, NOTE, Job, report_phase, report_progress

__all__ = ["WorkerError", "Workers", "report_phase", "report_progress", "run_on_ranks", "workers"]

Progress = Callable[[int, Any], None]  # called with a rank and what it reported
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SETTLE, GRACE, ANSWER = 0.3, 5.0, 2.0  # seconds: after an own error; after a secondary one; for a stuck rank to answer


class WorkerError(RuntimeError):
    """A rank has failed; the message begins with that rank and its own traceback.

    kind: "raised", "died" (its process ended) or "stuck" (no sign of life). traceback: the rank's, where it has one.
    rank is None if it is the starter that failed.
    """

    def __init__(self, message: str, rank: int | None = None, phase: str = "", kind: str = "died", traceback: str = ""):
        super().__init__(message)
        self.rank, self.phase, self.kind, self.traceback = rank, phase, kind, traceback


def run_on_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    device: str = "auto",
    timeout: float = 300,
    on_progress: Progress | None = None,
) -> list[Any]:
    """function(device, *args) in `world_size` ranks, as a list by rank: `Workers.call` in a pool of its own.

    Under torchrun its processes are the ranks, all of them return the whole list, errors are raised as they are, and
    on_progress is not called. ValueError if torchrun started another number of processes.
    """
    if all(name in os.environ for name in TORCHRUN):
        return _run_under_torchrun(function, args, world_size, device, timeout)
    with workers(world_size, device, timeout) as pool:
        return pool.call(function, *args, on_progress=on_progress)


@contextmanager
def workers(world_size: int, device: str = "auto", timeout: float = 300) -> Iterator[Workers]:
    """A pool for any number of calls of up to `world_size` ranks each. It leaves nothing behind.

    device: "cpu"; "cuda", one GPU per rank; "auto", which is "cuda" for a call with no more ranks than there are GPUs.
    timeout: seconds without a sign of life (a phase, progress, a result) from any rank until a call is stuck.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size must be 1 to {MAX_RANKS}, got {world_size}")
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; known: auto, cpu, cuda")
    with tempfile.TemporaryDirectory(prefix="shardiff-", ignore_cleanup_errors=True) as directory:
        pool = Workers(world_size, device, timeout, directory)
        pool.open()
        try:
            yield pool
        finally:
            pool.close()


@dataclass
class Workers:
    """A pool; see `workers`. `timeout` may be changed between calls."""

    world_size: int
    device: str
    timeout: float
    directory: str
    num_calls: int = 0

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        on_progress: Progress | None = None,
    ) -> list[Any]:
        """function(device, *args) in ranks 0 .. world_size-1 (default: all of the pool), as a list by rank.

        A rank has a default process group of just this call's ranks, and its share of the cores as torch threads unless
        OMP_NUM_THREADS is set. The function must be importable, arguments and results must be picklable.
        Raises WorkerError if a rank fails, ValueError if there are fewer ranks or GPUs than the call needs.
        """
        n = self.world_size if world_size is None else world_size
        if not 1 <= n <= self.world_size:
            raise ValueError(f"a pool of {self.world_size} ranks cannot run {n}")
        function = _importable(function)
        payload = pickle.dumps((function, args), 5)
        num_gpus = self._request("gpus")
        if self.device == "cuda" and num_gpus < n:
            raise ValueError(f"device cuda needs a GPU per rank: {n} ranks, {num_gpus} GPUs")
        directory = Path(self.directory, f"call-{self.num_calls}")
        self.num_calls += 1
        cuda = self.device != "cpu" and num_gpus >= n
        job = Job(n, cuda, str(directory), self.timeout, function.__module__, payload)
        pairs = [socket.socketpair() for _ in range(n)]
        try:
            directory.mkdir(parents=True)
            (directory / "phases").write_bytes(bytes(NOTE.size * n))
            self._request(job, [theirs.fileno() for _, theirs in pairs])
            for _, theirs in pairs:
                theirs.close()
            ranks = [_Rank(rank, n, ours) for rank, (ours, _) in enumerate(pairs)]
            try:
                _watch(ranks, directory, self.timeout, on_progress)
            except BaseException:
                with suppress(WorkerError):
                    self._request([False] * n)
                raise
            for rank, state in zip(ranks, self._request([rank.gone for rank in ranks]), strict=True):
                rank.state = state
            if error := _verdict(ranks, directory, self.timeout):
                raise error
            return [rank.result for rank in ranks]
        finally:
            for end in (end for pair in pairs for end in pair):
                end.close()
            shutil.rmtree(directory, ignore_errors=True)

    def open(self) -> None:
        """Start the starter, without waiting for it."""
        path = f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}"
        run = f"from {worker.__name__} import start_ranks; start_ranks({self.directory!r}, {self.device != 'cpu'})"
        environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # counting GPUs must not initialize CUDA
        self.control, theirs = socket.socketpair()
        with theirs:  # a session of its own, so that Ctrl-C reaches only the caller, which ends the others
            command = [sys.executable, "-c", f"{path}; {run}"]
            self.starter = subprocess.Popen(command, stdin=theirs.fileno(), env=environment, start_new_session=True)

    def close(self) -> None:
        """End all processes."""
        self.control.close()  # at which the starter ends its ranks and itself
        with suppress(subprocess.TimeoutExpired):
            self.starter.wait(10)
        self._kill()

    def _kill(self) -> int:
        """End the starter, and thereby its ranks, at once."""
        self.control.close()
        self.starter.kill()
        return self.starter.wait()

    def _request(self, request: Any, fds: Sequence[int] = ()) -> Any:
        """The starter's answer, or a new starter's if an earlier failure has ended it."""
        if self.starter.poll() is not None or self.control.fileno() < 0:
            self._kill()
            self.open()
        try:
            self.control.settimeout(max(60, self.timeout))
            socket.send_fds(self.control, [b"!"], fds)
            worker.send(self.control, request)
            failure, answer = worker.receive(self.control)
        except (OSError, EOFError) as error:
            raise WorkerError(f"the process that starts the ranks failed: {_ending(self._kill())} ({error})") from None
        except BaseException:
            self._kill()
            raise
        if failure:
            message = f"the process that starts the ranks raised:\n\n{failure}"
            raise WorkerError(message, None, "start-up", "raised", failure)
        return answer


@dataclass
class _Rank:
    """A rank as the caller knows it."""

    rank: int
    world_size: int
    socket: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    result: Any = None
    done: bool = False  # has sent its result
    released: bool = False  # may leave: all have sent their results
    gone: bool = False
    failed_at: float = math.inf  # time.monotonic(), one clock for all processes
    error_phase: str = ""
    error: str = ""
    secondary: bool = False  # the error is the consequence of another rank's
    stack: str = ""  # where it is when all are stuck
    waiting: bool = False  # and that it waits for others there
    state: int | str | None = None  # exit code, negative for a signal; "stopped"; None if it was running to the end

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def _importable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under the name by which ranks can import it: `python -m` calls its module __main__."""
    if getattr(function, "__module__", None) != "__main__":
        return function
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        raise ValueError(f"{function.__qualname__} is defined in the script that runs; ranks need it in a module")
    return getattr(importlib.import_module(spec.name), function.__qualname__)


def _watch(ranks: list[_Rank], directory: Path, timeout: float, on_progress: Progress | None) -> None:
    """Fill in `ranks` until all have sent results and are gone, or some have failed, or all are stuck."""
    alive, end, asked, notes = time.monotonic(), math.inf, False, b""
    while not all(rank.gone for rank in ranks):
        for rank, kind, content in _messages(ranks):
            alive = time.monotonic()
            if kind == "progress" and on_progress is not None:
                on_progress(rank.rank, *content)
            elif kind == "result":
                rank.done, rank.result = True, content[0]
            elif kind == "error":
                rank.failed_at, rank.error_phase, rank.error, rank.secondary = content
            elif kind == "stack":
                rank.stack, rank.waiting = content
            elif kind == "gone":
                rank.gone, rank.failed_at = True, rank.failed_at if rank.released else min(rank.failed_at, alive)
        previous, notes = notes, (directory / "phases").read_bytes()
        if notes != previous:
            alive = time.monotonic()
        if all(rank.done and not rank.released for rank in ranks):
            _tell(ranks, "release")
            for rank in ranks:
                rank.released = True
        failed, now = [rank for rank in ranks if rank.failed_at < math.inf], time.monotonic()
        if failed:
            end = min(end, now + (GRACE if all(rank.secondary for rank in failed) else SETTLE))
        elif not asked and now - alive > timeout:
            asked, end = True, now + ANSWER
            _tell(ranks, "where")
        if now > end or len(failed) == len(ranks) or (asked and all(rank.stack or rank.gone for rank in ranks)):
            return


def _tell(ranks: list[_Rank], message: str) -> None:
    for rank in ranks:
        with suppress(OSError):
            worker.send(rank.socket, message)


def _messages(ranks: list[_Rank]) -> Iterator[tuple[_Rank, str, Sequence[Any]]]:
    """(rank, kind, content) of the messages that come within a moment; an incomplete one stays in the inbox."""
    for sock in wait([rank.socket for rank in ranks if not rank.gone], 0.2):
        rank = next(rank for rank in ranks if rank.socket is sock)
        try:
            chunk = rank.socket.recv(1 << 20)
        except ConnectionError:
            chunk = b""
        if not chunk:
            yield rank, "gone", ()
        rank.inbox += chunk
        while len(rank.inbox) >= 8 and len(rank.inbox) - 8 >= (size := struct.unpack_from("!Q", rank.inbox)[0]):
            with memoryview(rank.inbox) as view:
                kind, *content = pickle.loads(view[8 : 8 + size])
            del rank.inbox[: 8 + size]
            yield rank, kind, content


def _verdict(ranks: list[_Rank], directory: Path, timeout: float) -> WorkerError | None:
    """Who failed first by its own fault, and how; None if nobody."""
    notes = [phase.rstrip(b"\0").decode() for _, phase in NOTE.iter_unpack((directory / "phases").read_bytes())]
    failed = [rank for rank in ranks if rank.failed_at < math.inf or (rank.gone and rank.state != 0)]
    stuck = [] if failed else [rank for rank in ranks if not rank.gone and (rank.released or not rank.done)]
    if not failed and not stuck:
        return None
    if failed:
        first = min(failed, key=lambda rank: (rank.secondary, rank.failed_at))
    else:
        first = min(stuck, key=lambda rank: (bool(rank.stack), rank.waiting))
    phase, kind, trace = notes[first.rank], "died", first.error
    if first.error:
        phase, kind = first.error_phase, "raised"
        message = f"{first} raised in phase {phase}:"
    elif failed:
        trace = (directory / f"fault-{first.rank}").read_text() if (directory / f"fault-{first.rank}").exists() else ""
        message = f"{first} died in phase {phase}: {_ending(first.state)}"
    else:
        kind, trace = "stuck", first.stack
        how = "it is stopped" if first.state == "stopped" else "it is at" if trace else "it does not answer"
        message = f"{first} is stuck in phase {phase}: no sign of life from any rank for {timeout:g} s; {how}"
    lines = [message, *(["", trace.rstrip(), ""] if trace else [])]
    for rank in failed or ranks:
        if rank is not first:
            lines.append(f"{rank}, in phase {rank.error_phase or notes[rank.rank]}, {_consequence(rank)}")
    return WorkerError("\n".join(lines), first.rank, phase, kind, trace)


def _consequence(rank: _Rank) -> str:
    """What became of a rank that is not the one to blame."""
    if rank.error:
        return "lost a connection" if rank.secondary else f"raised {rank.error.rstrip().splitlines()[-1]}"
    if rank.gone:
        return f"died: {_ending(rank.state)}"
    if rank.done:
        return "has its result"
    return "waits for others" if rank.waiting else "is stuck too"


def _ending(state: int | str | None) -> str:
    if not isinstance(state, int):
        return "it closed its connection"
    if state == -signal.SIGKILL:
        return "killed by SIGKILL, perhaps for lack of memory"
    return f"killed by {signal.Signals(-state).name}" if state < 0 else f"it exited with status {state}"


def _run_under_torchrun(
    function: Callable[..., Any], args: Sequence[Any], world_size: int, device: str, timeout: float
) -> list[Any]:
    """In the processes that torchrun started. The process group stays for later calls, until the process ends."""
    import torch
    import torch.distributed as dist

    started = int(os.environ["WORLD_SIZE"])
    if started != world_size:
        raise ValueError(f"the run needs {world_size} ranks, torchrun started {started}")
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", started))
    num_gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and num_gpus < local_size:
        raise ValueError(f"device cuda needs a GPU per rank: {local_size} ranks, {num_gpus} GPUs")
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    here = torch.device("cuda", local_rank) if num_gpus >= local_size else torch.device("cpu")
    if not dist.is_initialized():
        if local_size == started:
            worker.use_loopback()
        worker.init_group(here, timeout)
        atexit.register(dist.destroy_process_group)
    results: list[Any] = [None] * world_size
    try:
        dist.all_gather_object(results, function(here, *args))
    except BaseException:
        atexit.unregister(dist.destroy_process_group)  # it could wait for ranks that are gone
        raise
    return results
