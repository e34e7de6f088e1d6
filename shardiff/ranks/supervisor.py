"""Pools of rank processes: call functions on them, watch them, say which failed, and leave nothing behind.

A pool is the same for every framework. Where its processes come from and how they end differs, and is a `Processes`:
`torch_pool` forks fresh ranks for every call from one process that has imported torch; `jax_pool` has one interpreter
per rank, which stays.

A dead process is noticed by the end of file on its sockets: the caller names the rank that died and ends the others,
and a rank ends when its caller is gone, whatever the reason. Phases and calls are noted in shared memory, so that those
of a rank that was killed or stopped are known too. No file has a name that could be left behind.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from shardiff.ranks.messages import send
from shardiff.ranks.notes import read_notes
from shardiff.ranks.verdict import RankState, WorkerError, verdict
from shardiff.ranks.watch import Progress, watch
from shardiff.system.network import loopback_only
from shardiff.system.processes import nameless_file

TIMEOUT = 30.0  # seconds of silence until ranks are stuck

# For GLIBC_TUNABLES: what is freed stays with the process, whichever thread allocates next. Else a step may pay for the
# same pages anew: half of the time of an update in JAX, a tenth of each stage's first backward pass in torch.
KEEP_FREED = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776:glibc.malloc.arena_max=1"


class Processes(Protocol):
    """A pool's rank processes: what differs from framework to framework.

    stay: whether ranks stay for another call when one has succeeded.
    """

    stay: bool

    def open(self, timeout: float) -> None:
        """Start what can be started before the first call, without waiting for it."""
        ...

    def begin(self, count: int, module: str | None, timeout: float, stack: ExitStack) -> tuple[list[RankState], Path]:
        """This many ranks, ready for a call of a function of `module`, and the file of their notes.

        What is only for this call ends with `stack`. Raises ValueError if there cannot be so many.
        """
        ...

    def settle(self, ranks: Sequence[RankState], timeout: float, given_up: bool = False) -> None:
        """A call is over: end the ranks that do not stay, and all if it failed or is given up. Say how each ended.

        Raises WorkerError if what starts the ranks has failed."""
        ...

    def close(self) -> None:
        """End everything."""
        ...


@contextmanager
def pool(processes: Processes, world_size: int, timeout: float) -> Iterator[Workers]:
    """The processes as a pool, which ends with the block."""
    try:
        processes.open(timeout)
        yield Workers(processes, world_size, timeout)
    finally:
        processes.close()


@dataclass
class Workers:
    """Rank processes for any number of calls. `timeout` may be changed between calls.

    timeout: seconds without a sign of life (a phase, progress, a result) from any rank until a call is stuck; ten times
    as many while ranks compute, compile or read.
    """

    processes: Processes
    world_size: int
    timeout: float

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        on_progress: Progress | None = None,
    ) -> list[Any]:
        """function(*args) in ranks 0 .. world_size-1 at once (default: all of the pool), as a list by rank.

        In torch the rank's device comes first: function(device, *args), as torch itself knows of no such thing. The
        function must be importable by module and name, arguments and results must be picklable. on_progress is called
        with a rank and what it passes to `report_progress`.
        Raises WorkerError if a rank fails, after which the next call starts anew; ValueError if there are fewer ranks
        or devices than the call needs.
        """
        n = self.world_size if world_size is None else world_size
        if not 1 <= n <= self.world_size:
            raise ValueError(f"a pool of {self.world_size} ranks cannot run {n}")
        function = importable(function)
        with ExitStack() as stack:
            job = nameless_file(stack)  # which all ranks read: nothing is sent once for each, or waits for one
            with open(job, "wb") as file:
                pickle.dump((function, args), file, 5)
            ranks, notes = self.processes.begin(n, getattr(function, "__module__", None), self.timeout, stack)
            try:
                for rank in ranks:
                    with suppress(OSError):  # one that is gone is found by watch
                        send(rank.socket, str(job))
                watch(ranks, notes, self.timeout, on_progress, self.processes.stay)
            except BaseException:  # an interrupt, or an error of on_progress
                with suppress(WorkerError):
                    self.processes.settle(ranks, self.timeout, True)
                raise
            self.processes.settle(ranks, self.timeout)
            if error := verdict(ranks, read_notes(notes), self.timeout):
                raise error
            return [rank.result for rank in ranks]


def importable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under the name by which ranks can import it: `python -m` calls its module __main__."""
    if getattr(function, "__module__", None) != "__main__":
        return function
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        raise ValueError(f"{function.__qualname__} is defined in the script that runs; ranks need it in a module")
    return getattr(importlib.import_module(spec.name), function.__qualname__)


def interpreter(
    module: str, function: str, environment: Mapping[str, str], stderr: IO[bytes] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A new Python process that runs a function of a module, and a socket whose other end is its standard input.

    It is new so that the caller's __main__ is not run again, and nothing that the caller has started (XLA's threads,
    CUDA) is forked. It imports from where the caller does, in the same order, whatever its current directory holds, and
    has a session of its own, so that Ctrl-C reaches only the caller, which ends the others.
    """
    path = [str(entry) for entry in sys.path]
    code = f"import sys; sys.path[:] = {path!r}; from {module} import {function}; {function}()"
    variables = {"GLIBC_TUNABLES": KEEP_FREED, **environment, **loopback_only()}
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=theirs.fileno(),
                stderr=stderr,
                env=variables,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def end(process: subprocess.Popen[bytes]) -> int:
    """End an interpreter at once with all that it has started; its exit code, negative for a signal.

    That is what is in its session, and what its living processes have started in others.
    """
    started: list[psutil.Process] = []
    if process.poll() is None:
        with suppress(psutil.Error):
            started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    code = process.wait()
    for pid in psutil.pids():
        with suppress(OSError):
            if os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
    for other in started:
        with suppress(psutil.Error):
            other.kill()
    return code
