"""Ranks of torch.distributed, fresh for every call: what of `supervisor` differs for torch.

A pool is one process, the starter, that imports torch once and forks the ranks of every call:

    caller ------- control socket ------- starter
      |                                      | fork, wait, kill
      +-------- a socket per rank -------- rank 0 .. n-1, each for one call

Fresh ranks cost milliseconds, and nothing of one call, above all none of its failures, reaches the next. Ranks meet
through a file without a name and talk over the loopback interface only; with CUDA, rank r has GPU r and NCCL.

The starter ends the ranks when the caller is gone, and a rank ends when the caller or the starter is gone. What the
ranks start themselves, the starter ends, and if it cannot, the caller.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from shardiff.ranks import torch_starter
from shardiff.ranks.messages import receive, send
from shardiff.ranks.notes import begin_notes
from shardiff.ranks.silence import BUSY, Silence
from shardiff.ranks.supervisor import TIMEOUT, Workers, end, interpreter, pool
from shardiff.ranks.torch_starter import MAX_RANKS, Job
from shardiff.ranks.verdict import RankState, WorkerError, ending
from shardiff.ranks.watch import Progress, patience
from shardiff.system import torchrun
from shardiff.system.network import loopback_only
from shardiff.system.processes import nameless_file


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
    if here := torchrun.started():
        return _run_under_torchrun(here, function, args, world_size, device, timeout)
    with workers(world_size, device, timeout) as ranks:
        return ranks.call(function, *args, on_progress=on_progress)


@contextmanager
def workers(world_size: int, device: str = "auto", timeout: float = TIMEOUT, staged: bool = False) -> Iterator[Workers]:
    """A pool for any number of calls of up to `world_size` ranks each. It leaves nothing behind.

    A rank has a default process group of just its call's ranks, and its share of the cores as torch threads unless
    OMP_NUM_THREADS is set. The module of a function that is called is imported before the fork, and so must not start
    threads or CUDA when imported. If it has a tuple BEFORE_FORK, the names of modules that its functions import when
    they run, these are imported with it, once instead of in every rank, unless there are GPUs.

    device: "cpu"; "cuda", one GPU per rank; "auto", which is "cuda" for a call with no more ranks than there are GPUs.
    timeout: see `Workers`. staged: collectives go through the host's memory (`torch_staged`), so that with "cuda" any
    number of ranks share the GPUs that there are, one at least.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size must be 1 to {MAX_RANKS}, got {world_size}")
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; known: auto, cpu, cuda")
    with pool(Forked(device, staged), world_size, timeout) as ranks:
        yield ranks


class Forked:
    """Ranks that a starter forks for one call."""

    stay = False

    def __init__(self, device: str, staged: bool = False) -> None:
        self.device, self.staged = device, staged
        self.starter: subprocess.Popen[bytes] | None = None
        self.control: socket.socket

    def open(self, timeout: float) -> None:
        environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # counting GPUs must not initialize CUDA
        self.starter, self.control = interpreter(torch_starter.__name__, "start_ranks", environment)
        with suppress(OSError):  # one that is gone is found by its first request
            send(self.control, self.device != "cpu")

    def begin(self, count: int, module: str | None, timeout: float, stack: ExitStack) -> tuple[list[RankState], Path]:
        if self.starter is None or self.starter.poll() is not None:  # it has failed since
            self._kill()
            self.open(timeout)
        num_gpus = self._request("gpus", timeout)
        needed = 1 if self.staged else count
        if self.device == "cuda" and num_gpus < needed:
            least = "at least one GPU" if self.staged else "a GPU per rank"
            raise ValueError(f"device cuda needs {least}: {count} ranks, {num_gpus} GPUs")
        used = num_gpus if self.device != "cpu" and num_gpus >= needed else 0
        pairs = [socket.socketpair() for _ in range(count)]
        for one in (one for pair in pairs for one in pair):
            stack.callback(one.close)
        notes, store = nameless_file(stack), nameless_file(stack)
        begin_notes(notes, count)
        job = Job(count, used, self.staged, notes, store, timeout, module)
        pids = self._request(job, timeout, [theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        return [
            RankState(r, count, ours, pid) for r, ((ours, _), pid) in enumerate(zip(pairs, pids, strict=True))
        ], notes

    def settle(self, ranks: Sequence[RankState], timeout: float, given_up: bool = False) -> None:
        for rank, state in zip(ranks, self._request([rank.gone for rank in ranks], timeout), strict=True):
            rank.state = state
            rank.last_words = rank.inbox.decode(errors="replace")  # what is no message: a fatal error's traceback

    def close(self) -> None:
        if self.starter is not None:
            with suppress(OSError):
                self.control.shutdown(socket.SHUT_RDWR)  # at which the starter ends its ranks and itself
            with suppress(subprocess.TimeoutExpired):
                self.starter.wait(10)
            self._kill()

    def _kill(self) -> int | None:
        """End the starter at once, and thereby its ranks; and what these had started, which it cannot end then."""
        if self.starter is None:
            return None
        self.control.close()
        starter, self.starter = self.starter, None
        return 0 if starter.poll() == 0 else end(starter)

    def _request(self, request: Any, timeout: float, fds: Sequence[int] = ()) -> Any:
        """The starter's answer. If there is none, the starter is ended."""
        least = 10 if isinstance(request, list) else 0  # ranks take a while to end
        limit = max(least, patience(timeout))
        if self.starter is None:
            raise WorkerError("the pool of ranks has been closed")
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
    here: torchrun.Started,
    function: Callable[..., Any],
    args: Sequence[Any],
    world_size: int,
    device: str,
    timeout: float,
) -> list[Any]:
    """In the processes that torchrun started. The process group stays for later calls, until the process ends."""
    if here.world_size != world_size:
        raise ValueError(f"the run needs {world_size} ranks, torchrun started {here.world_size}")
    import torch
    import torch.distributed as dist

    num_gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and num_gpus < here.local_world_size:
        raise ValueError(f"device cuda needs a GPU per rank: {here.local_world_size} ranks, {num_gpus} GPUs")
    enough = num_gpus >= here.local_world_size
    this_device = torch.device("cuda", here.local_rank) if enough else torch.device("cpu")
    if not dist.is_initialized():
        if here.local_world_size == here.world_size:
            os.environ.update(loopback_only())
        # Nobody watches: a collective that others do not join ends by itself.
        torch_starter.init_group(this_device, BUSY * timeout)
        atexit.register(dist.destroy_process_group)
    results: list[Any] = [None] * world_size
    try:
        dist.all_gather_object(results, function(this_device, *args))
    except BaseException:
        atexit.unregister(dist.destroy_process_group)  # it could wait for ranks that are gone
        raise
    return results
