"""A plugin for coverage: a process that another one is about to kill first saves what it has run.

Ranks are ended with SIGKILL, in normal operation too, and their data would be lost. So the sender first sends another
signal, which this plugin handles in the target, and waits for a file that says that the target has saved. A target that
is stopped, or held in a library, does not answer and is killed a second later.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from coverage import Coverage

DEADLY = (signal.SIGKILL, signal.SIGABRT, signal.SIGTERM)
SAVE = signal.SIGUSR1  # the other is the ranks' own
PATIENCE = 1  # seconds


def coverage_init(register: Any, options: Any) -> None:
    """Called by coverage in every process that it measures, and again in every fork."""
    with suppress(ValueError):  # not the main thread
        signal.signal(SAVE, save)
    if not hasattr(os.kill, "before"):
        os.kill = saving_first(os.kill, lambda pid: [pid])
        os.killpg = saving_first(os.killpg, members)


def saving_first(kill: Callable[[int, int], None], of: Callable[[int], Iterable[int]]) -> Callable[[int, int], None]:
    """os.kill, which Popen.kill and psutil call as well, or os.killpg. of: the processes that the number stands for."""

    def kill_saved(target: int, number: int) -> None:
        if number in DEADLY:
            pids = list(of(target))
            asked = [pid for pid in pids if pid != os.getpid() and handles_save(pid)]
            for pid in asked:
                said(pid).unlink(missing_ok=True)
                with suppress(OSError):
                    os.kill(pid, SAVE)
            end = time.monotonic() + PATIENCE
            while not all(said(pid).exists() for pid in asked) and time.monotonic() < end:
                time.sleep(0.002)
            if os.getpid() in pids:
                save()
        kill(target, number)

    kill_saved.before = kill
    return kill_saved


def members(group: int) -> Iterator[int]:
    """The processes of a process group; 0 stands for this process's own."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            if int(stat.read_text().rpartition(")")[2].split()[2]) == (group or os.getpgrp()):
                yield int(stat.parent.name)


def save(*signal_and_frame: Any) -> None:
    """Write what this process has run so far, and say so."""
    with suppress(Exception):
        if current := Coverage.current():
            current.save()
    with suppress(OSError):
        said(os.getpid()).touch()


def said(pid: int) -> Path:
    """The file that says that a process has saved."""
    return Path(os.environ["SHARDIFF_COVERAGE"], f"saved-{pid}")


def handles_save(pid: int) -> bool:
    """Whether a process has this plugin's handler, and runs: the signal would end another, or not be seen."""
    try:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except (OSError, ValueError):
        return False
    return int(status["SigCgt"], 16) >> (SAVE - 1) & 1 == 1 and status["State"][0] in "RSD"
