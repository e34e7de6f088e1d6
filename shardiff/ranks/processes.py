"""What both launchers of rank processes agree on: what ranks note, what silence is, and that nothing is left.

Standard library only: every rank imports it before anything else.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

ITS_TURN = "its turn"  # the phase of a rank that waits for a request: as long as all do, none is silent
BUSY = 10  # silent processes that work are given so many times as long as idle ones
LOOK = 1.0  # seconds from one look at the processes to the next
SHARE = 0.02  # of a core, above which a process works; waiting for others takes less
LEAST = 0.05  # seconds of it, as the clock of processes ticks in hundredths

# For GLIBC_TUNABLES: what is freed stays with the process, whichever thread allocates next. Else a step may pay for the
# same pages anew: half of the time of an update in JAX, a tenth of each stage's first backward pass in torch.
KEEP_FREED = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776:glibc.malloc.arena_max=1"

PHASE = struct.Struct("Q56s")  # number of reports, phase
CALL = struct.Struct("QQ40s72s")  # number of the call, bytes, what is called, by or with whom
SIZE = PHASE.size + CALL.size  # of what a rank notes


class WorkerError(RuntimeError):
    """A rank has failed; the message begins with that rank and its own traceback.

    kind: "raised", "died" (its process ended) or "stuck" (no sign of life). traceback: the rank's, where it has one.
    rank is None if it is the process that starts the ranks that failed.
    """

    def __init__(
        self, message: str, rank: int | None = None, phase: str = "", kind: str = "died", traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.rank, self.phase, self.kind, self.traceback = rank, phase, kind, traceback


class Note(NamedTuple):
    """What a rank has noted last. call: "" if none."""

    reports: int
    phase: str
    call: str


class Notes:
    """A rank's part of a file that all processes map, so that its notes are known when it is stopped or dead, too."""

    def __init__(self, path: Path, rank: int) -> None:
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        self.start, self.now, self.reports = rank * SIZE, "", 0

    def phase(self, phase: str) -> None:
        """Note what the rank does now. Takes a microsecond."""
        self.now, self.reports = phase, self.reports + 1
        PHASE.pack_into(self.memory, self.start, self.reports, phase.encode())

    def call(self, number: int, size: int, what: bytes, whom: bytes) -> None:
        """Note the call that is about to be made. size: bytes. Takes half a microsecond."""
        CALL.pack_into(self.memory, self.start + PHASE.size, number, size, what, whom)


def begin_notes(path: Path, count: int) -> None:
    """Make the file for the notes of so many ranks."""
    path.write_bytes((PHASE.pack(0, b"start-up") + bytes(CALL.size)) * count)


def read_notes(path: Path) -> list[Note]:
    """What every rank has noted."""
    data, notes = path.read_bytes(), []
    for start in range(0, len(data), SIZE):
        reports, phase = PHASE.unpack_from(data, start)
        number, size, *words = CALL.unpack_from(data, start + PHASE.size)
        text, what, whom = (word.rstrip(b"\0").decode(errors="replace") for word in (phase, *words))
        notes.append(Note(reports, text, f"{what} no. {number}, {size:,} bytes, {whom}" if number else ""))
    return notes


class Silence:
    """Whether processes have been silent for too long.

    `heard` tells of a sign of life: a phase, a call, progress, a result. Without one, processes that work (import,
    compile, compute, send) are given BUSY times as long as idle ones.
    """

    def __init__(self, timeout: float, pids: Iterable[int]) -> None:
        self.timeout, self.pids = timeout, tuple(pids)
        self.heard()

    def heard(self) -> None:
        self.since = self.idle_since = self.looked = time.monotonic()
        self.worked: list[float] | None = None

    def over(self) -> bool:
        """Whether it has lasted too long. Looks at the processes now and then, in the second half of `timeout`."""
        now, look = time.monotonic(), min(LOOK, self.timeout / 3)
        if now - self.since < self.timeout / 2 or now - self.looked < look:
            return False
        before, self.worked = self.worked, [work(pid) for pid in self.pids]
        least, self.looked = max(LEAST, SHARE * (now - self.looked)), now
        if before is None:
            return False
        if max(map(float.__sub__, self.worked, before), default=0.0) > least:
            self.idle_since = now
        return now - self.idle_since > self.timeout - look or now - self.since > BUSY * self.timeout


def work(pid: int) -> float:
    """Seconds of CPU time of a process since it began; a megabyte read from a disk counts as one. 0 where unknown."""
    seconds = 0.0
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        read = Path(f"/proc/{pid}/io").read_text().partition("\nread_bytes:")[2].split()[0]
        seconds += int(read) / 1e6
    return seconds


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP. False where that is unknown."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


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
    """Become the parent of what children of this process have started when they end. On Linux only."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def importable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under the name by which ranks can import it: `python -m` calls its module __main__."""
    if getattr(function, "__module__", None) != "__main__":
        return function
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        raise ValueError(f"{function.__qualname__} is defined in the script that runs; ranks need it in a module")
    return getattr(importlib.import_module(spec.name), function.__qualname__)


def ending(state: int | str | None) -> str:
    """An exit code, negative for a signal, in words."""
    if not isinstance(state, int):
        return "it closed its connection"
    if state == -signal.SIGKILL:
        return "killed by SIGKILL, perhaps for lack of memory"
    return f"killed by {signal.Signals(-state).name}" if state < 0 else f"it exited with status {state}"


def where(observer: int, ours: str, waits: Callable[[str], bool]) -> tuple[str, bool]:
    """The stacks of this process's threads but `observer`, and whether one of them waits for other ranks.

    ours: the file whose frames come first, and are left out. waits: whether a stack is that of such a thread.
    """
    stacks: list[str] = []
    for thread, frame in sys._current_frames().items():
        if thread != observer:
            stack = [entry for entry in traceback.extract_stack(frame) if not entry.filename.startswith("<")]
            own = [i for i, entry in enumerate(stack[:-1]) if entry.filename == ours]
            stacks.append("".join(traceback.format_list(stack[own[-1] + 1 if own else 0 :])))
    return "\n".join(stacks), any(map(waits, stacks))


def report(error: BaseException, signs: Sequence[str]) -> tuple[str, bool]:
    """The traceback of a rank's error without the launcher's frame, and whether another rank may have caused it.

    signs: what a RuntimeError says that tells of a connection.
    """
    frames = error.__traceback__ and error.__traceback__.tb_next or error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, frames))
    return text, isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
