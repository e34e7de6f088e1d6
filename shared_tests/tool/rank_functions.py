"""What the tests of pools run on ranks, and faults to plant there."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from shardiff.ranks.rank import report_phase, report_progress, this_rank


def started(work: dist.Work | None) -> dist.Work:
    """What an asynchronous call has started, which is nothing only on a rank that has no part in it."""
    assert work is not None
    return work


def rank_sum(device: torch.device, value: float = 1.0) -> tuple[int, int, float]:
    total = torch.tensor(value * dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def step(device: torch.device, fault: Fault | None = None) -> int:
    """Two collectives in two phases, as a training step has them. The fault was planted when it was unpickled."""
    for phase in ("forward", "backward"):
        report_phase(phase)
        dist.all_reduce(torch.ones(100))
    report_phase("update")
    return os.getpid()


class Fault:
    """An argument that makes rank `rank` fail when it reports `phase`. It does so by being unpickled there."""

    def __init__(self, phase: str, how: str, rank: int = 2):
        self.args = (phase, how, rank)

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str, str, int]]:
        return plant, self.args


def plant(where: str, how: str, rank: int) -> None:
    this = this_rank()
    if this is None or this.rank != rank:
        return
    report = this.report_phase

    def report_and_fail(phase: str) -> None:
        report(phase)
        if phase == where:
            fail(how)

    this.report_phase = report_and_fail


def fail(how: str) -> None:
    if how == "raise":
        raise ValueError("the planted error")
    elif how == "allocate":
        torch.empty(1 << 60, dtype=torch.uint8)
    elif how == "exit 0":
        os._exit(0)
    elif how == "sleep":
        time.sleep(1000)
    else:
        os.kill(os.getpid(), signal.Signals[how])


def double(device: torch.device, array: np.ndarray) -> np.ndarray:
    return array * (2 if dist.get_rank() == 0 else 0)


def count(device: torch.device, pause: float = 0) -> int:
    """Report three times, and return the number of threads."""
    for i in range(3):
        report_progress((i, os.getpid()))
        time.sleep(pause)
    return torch.get_num_threads()


def with_a_process(device: torch.device, fault: Fault | None = None) -> None:
    """Leave a process behind that has a session of its own."""
    report_progress(subprocess.Popen(["sleep", "3600"], start_new_session=True).pid)
    dist.barrier()  # a rank that dies at once would end the other before that has told of its process
    report_phase("forward")


def pickles_badly(device: torch.device) -> Any:
    return lambda: None


def listening() -> set[str]:
    """The addresses at which this process listens."""
    return {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}


def assert_gone(pids: list[int], patience: float = 5) -> None:
    """Processes end within a moment. A dead one that its new parent has not waited for yet is gone too."""
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], patience)
    assert [process for process in alive if process.is_running() and process.status() != "zombie"] == []
