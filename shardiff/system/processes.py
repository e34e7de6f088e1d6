"""Processes as the kernel knows them: what they use, whether they are stopped, who ends with whom, what they share.

Standard library only: ranks and traced scripts import it before anything else.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path


def seconds_of_work(pid: int) -> float:
    """Seconds of CPU time that a process has used; a megabyte read from a disk counts as one. 0 where unknown."""
    seconds = 0.0
    with suppress(OSError, ValueError, IndexError):
        fields = _stat(pid)
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        read = Path(f"/proc/{pid}/io").read_text().partition("\nread_bytes:")[2].split()[0]
        seconds += int(read) / 1e6
    return seconds


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP. False where that is unknown."""
    with suppress(OSError, IndexError):
        return _stat(pid)[0] == "T"
    return False


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the program's name, which may hold anything: the state comes first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def nameless_file(stack: ExitStack) -> Path:
    """The path of an empty file that other processes can open, and that is gone with this process, however it ends.

    Where the system has no such files, it is in a directory that `stack` removes.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("shardiff")
        stack.callback(os.close, fd)
        return Path(f"/proc/{os.getpid()}/fd/{fd}")
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardiff-", ignore_cleanup_errors=True))
    path = Path(directory, "file")
    path.touch()
    return path


def when_parent_ends(number: int) -> None:
    """Have this signal sent to this process when its parent ends. On Linux only."""
    _prctl(1, number)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Become the parent of whatever this process's descendants leave behind when they end. On Linux only."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
