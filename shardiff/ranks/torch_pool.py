"""Worker processes, one per rank: start, watch, collect errors, end.

A pool is one process, the starter, that imports torch once and forks the ranks of every call:

    caller ------- control socket ------- starter
      |                                      | fork, wait, kill
      +-------- a socket per rank -------- rank 0 .. n-1, each for one call

Fresh ranks cost milliseconds, and nothing of one call, above all none of its failures, reaches the next. The starter is
a new interpreter: the caller's __main__ is not run again, and nothing that it has started (JAX, threads, CUDA) is
forked. Ranks meet through a file without a name and talk over the loopback interface only; with CUDA, rank r has GPU r
and NCCL.

A dead process is noticed by the end of file on its sockets: the caller names the rank that died and ends the others,
the starter ends the ranks when the caller is gone, a rank ends when the caller or the starter is gone. What the ranks
start themselves, the starter ends, and if it cannot, the caller. Phases and collectives are noted in shared memory, so
that those of a rank that was killed or stopped are known too. No file has a name that could be left behind.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import psutil

from shardiff.ranks import torch_rank as worker
from shardiff.ranks.processes import (
    BUSY,
    KEEP_FREED,
    Silence,
    WorkerError,
    begin_notes,
    ending,
    importable,
    nameless_file,
)
from shardiff.ranks.torch_rank import MAX_RANKS, Job, report_phase, report_progress
from shardiff.ranks.watch import SPARE, Progress, RankState, receive, send, verdict, watch

__all__ = ["WorkerError", "Workers", "report_phase", "report_progress", "run_on_ranks", "workers"]

TIMEOUT = 30.0  # seconds of silence until ranks are stuck
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_on_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    device: str = "auto",
    timeout: float = TIMEOUT,
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
def workers(world_size: int, device: str = "auto", timeout: float = TIMEOUT) -> Iterator[Workers]:
    """A pool for any number of calls of up to `world_size` ranks each. It leaves nothing behind.

    device: "cpu"; "cuda", one GPU per rank; "auto", which is "cuda" for a call with no more ranks than there are GPUs.
    timeout: seconds without a sign of life (a phase, progress, a result) from any rank until a call is stuck; ten times
    as many while ranks compute or read.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size must be 1 to {MAX_RANKS}, got {world_size}")
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; known: auto, cpu, cuda")
    pool = Workers(world_size, device, timeout)
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

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        on_progress: Progress | None = None,
    ) -> list[Any]:
        """function(device, *args) in ranks 0 .. world_size-1 (default: all of the pool), as a list by rank.

        A rank has a default process group of just this call's ranks, and its share of the cores as torch threads unless
        OMP_NUM_THREADS is set. The function must be importable, arguments and results must be picklable. Its module is
        imported before the fork and so must not start threads or CUDA when imported.
        Raises WorkerError if a rank fails, ValueError if there are fewer ranks or GPUs than the call needs.
        """
        n = self.world_size if world_size is None else world_size
        if not 1 <= n <= self.world_size:
            raise ValueError(f"a pool of {self.world_size} ranks cannot run {n}")
        function = importable(function)
        payload = pickle.dumps((function, args), 5)
        if self.starter.poll() is not None:  # an earlier failure has ended it
            self._kill()
            self.open()
        num_gpus = self._request("gpus")
        if self.device == "cuda" and num_gpus < n:
            raise ValueError(f"device cuda needs a GPU per rank: {n} ranks, {num_gpus} GPUs")
        cuda = self.device != "cpu" and num_gpus >= n
        with ExitStack() as stack:
            pairs = [socket.socketpair() for _ in range(n)]
            for end in (end for pair in pairs for end in pair):
                stack.callback(end.close)
            notes, store = nameless_file(stack), nameless_file(stack)
            begin_notes(notes, n)
            job = Job(n, cuda, notes, store, self.timeout, getattr(function, "__module__", None), payload)
            pids = self._request(job, [theirs.fileno() for _, theirs in pairs])
            for _, theirs in pairs:
                theirs.close()
            ranks = [
                RankState(rank, n, ours, pid) for rank, ((ours, _), pid) in enumerate(zip(pairs, pids, strict=True))
            ]
            try:
                watch(ranks, notes, self.timeout, on_progress)
            except BaseException:
                with suppress(WorkerError):
                    self._request([False] * n)
                raise
            for rank, state in zip(ranks, self._request([rank.gone for rank in ranks]), strict=True):
                rank.state = state
                rank.last_words = rank.inbox.decode(errors="replace")  # what is no message: a fatal error's traceback
            if error := verdict(ranks, notes, self.timeout):
                raise error
            return [rank.result for rank in ranks]

    def open(self) -> None:
        """Start the starter, without waiting for it."""
        path = f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}"
        run = f"from {worker.__name__} import start_ranks; start_ranks({self.device != 'cpu'})"
        environment = {
            "GLIBC_TUNABLES": KEEP_FREED,
            **os.environ,
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting GPUs must not initialize CUDA
        }
        self.control, theirs = socket.socketpair()
        with theirs:  # a session of its own, so that Ctrl-C reaches only the caller, which ends the others
            command = [sys.executable, "-c", f"{path}; {run}"]
            self.starter = subprocess.Popen(command, stdin=theirs.fileno(), env=environment, start_new_session=True)

    def close(self) -> None:
        """End all processes."""
        with suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)  # at which the starter ends its ranks and itself
        with suppress(subprocess.TimeoutExpired):
            self.starter.wait(10)
        self._kill()

    def _kill(self) -> int:
        """End the starter at once, and thereby its ranks; and what these had started, which it cannot end then."""
        self.control.close()
        if self.starter.poll() is None:
            self.starter.kill()
        if self.starter.wait() != 0:
            for pid in psutil.pids():
                with suppress(OSError):
                    if os.getsid(pid) == self.starter.pid:
                        os.kill(pid, signal.SIGKILL)
        return self.starter.returncode

    def _request(self, request: Any, fds: Sequence[int] = ()) -> Any:
        """The starter's answer. If there is none, the starter is ended."""
        least = 10 if isinstance(request, list) else 0  # ranks take a while to end
        limit = max(least, self.timeout - (SPARE if self.timeout >= 10 * SPARE else 0))
        silence = Silence(limit, [self.starter.pid])  # which may have to import
        try:
            self.control.settimeout(limit)
            socket.send_fds(self.control, [b"!"], fds)
            send(self.control, request)
            while not wait([self.control], 0.2):
                if silence.over():
                    raise TimeoutError
            failure, answer = receive(self.control)
        except (OSError, EOFError) as error:
            status = ending(self._kill())
            how = f"no answer for {limit:g} s" if isinstance(error, TimeoutError) else status
            raise WorkerError(f"the process that starts the ranks failed: {how}", None, "start-up") from None
        except BaseException:
            self._kill()
            raise
        if failure:
            message = f"the process that starts the ranks raised:\n\n{failure}"
            raise WorkerError(message, None, "start-up", "raised", failure)
        return answer


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
        worker.init_group(here, BUSY * timeout)  # nobody watches: a collective that others do not join ends by itself
        atexit.register(dist.destroy_process_group)
    results: list[Any] = [None] * world_size
    try:
        dist.all_gather_object(results, function(here, *args))
    except BaseException:
        atexit.unregister(dist.destroy_process_group)  # it could wait for ranks that are gone
        raise
    return results
