"""The processes of a script, started as torchrun would start them, and ended with all that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shardiff.system.machine import threads
from shardiff.system.network import LOOPBACK, listening_port, loopback_only
from shardiff.tracing.settings import Settings, command
from shardiff.tracing.stacks import ask
from shardiff.tracing.verifier import Verdict

GRACE = 10.0  # seconds that the other processes have to end when one has failed
SETTLE = 5.0  # and to show an error of their own when that is why the others cannot go on


class Watch(Protocol):
    """What looks on while the processes run. started: which they are; step: for so many seconds; idle: whether it has
    seen the last of them."""

    def started(self, pids: Sequence[int]) -> None: ...

    def step(self, patience: float) -> Verdict | None: ...

    def idle(self) -> bool: ...


@dataclass(frozen=True)
class Launch:
    """A program to run, and where its ranks put what they note.

    settings: what each process is told. nproc: processes, or None for one with torchrun's environment as it is, or 0
    for one without it, which starts ranks of its own. quiet: standard output is taken, so the program's goes to
    standard error.
    """

    settings: Settings
    nproc: int | None
    quiet: bool


def run(launch: Launch, watch: Watch) -> tuple[int, Verdict | None]:
    """Run the script until all its processes have ended, or one has failed, or there is a verdict.

    Returns the status of the first process to fail, else 0; 130 or 143 if ended by SIGINT or SIGTERM; and the verdict.
    """
    nproc = launch.nproc
    processes: list[subprocess.Popen[bytes]] = []
    ended: list[int] = []

    def interrupt(signum: int, frame: object) -> None:
        ended.append(signum)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with store_socket(nproc) as (fd, port):
            for rank in range(nproc or 1):
                fds = () if rank or fd < 0 else (fd,)
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", command(replace(launch.settings, fd=fds[0] if fds else -1))],
                        env=os.environ if nproc is None else os.environ | environment(rank, nproc, port),
                        stdin=None if nproc in (0, 1) else subprocess.DEVNULL,
                        stdout=sys.stderr if launch.quiet else None,
                        pass_fds=fds,
                        start_new_session=True,  # Ctrl-C comes here only, and what a rank starts can be ended
                    )
                )
        watch.started([process.pid for process in processes])
        status, verdict = wait(processes, watch, int(os.environ["RANK"]) if nproc is None else 0)
        if verdict and verdict.kind == "stuck":
            for pid, stack in ask(map(str, verdict.running)).items():
                print(f"process {pid} is at:\n{stack}", file=sys.stderr)
        return status, verdict
    except KeyboardInterrupt:
        return 128 + (signal.SIGTERM if ended else signal.SIGINT), None
    finally:
        signal.signal(signal.SIGTERM, before)
        end(processes)


@contextmanager
def store_socket(nproc: int | None) -> Iterator[tuple[int, int]]:
    """The file descriptor and port of a socket for the ranks' store: on loopback only, and no one can take the port."""
    if not nproc:
        yield -1, 0
        return
    with listening_port() as found:
        yield found


def environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """What torchrun sets (pytorch.org/docs/stable/elastic/run.html), and loopback for what the ranks send.

    nproc = 0: loopback alone.
    """
    if nproc == 0:
        return {name: str(value) for name, value in loopback_only().items()}
    variables: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": nproc,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "shardiff",
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or threads(nproc),
        **loopback_only(),
    }
    return {name: str(value) for name, value in variables.items()}


def wait(processes: Sequence[subprocess.Popen[bytes]], watch: Watch, first_rank: int = 0) -> tuple[int, Verdict | None]:
    """Wait until all have ended, or there is a verdict, but not long once one has failed.

    Returns the status of the first to fail, after saying which it was, else 0; and the verdict.
    """
    status, verdict, deadline = 0, None, float("inf")
    while time.monotonic() < deadline:
        if verdict:
            time.sleep(0.02)
        elif verdict := watch.step(0.02):
            deadline = min(deadline, time.monotonic() + SETTLE)
        running = [process for process in processes if process.poll() is None]
        failed = [
            (rank, process.returncode) for rank, process in enumerate(processes, first_rank) if process.returncode
        ]
        if failed and not status:
            rank, code = failed[0]
            status, deadline = code if code > 0 else 128 - code, min(deadline, time.monotonic() + GRACE)
            how = f"with status {code}" if code > 0 else f"by signal {signal.Signals(-code).name}"
            print(f"shardiff: the script ended {how} on rank {rank}", file=sys.stderr)
        if (verdict and (status or not verdict.failed)) or (not running and (verdict or watch.idle())):
            break
    return status, verdict


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that still run, with what they started."""
    running = [process for process in processes if process.poll() is None]
    for kind, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
