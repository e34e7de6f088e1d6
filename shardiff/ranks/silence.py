"""When processes have been silent for too long, and a watch for that on this process itself."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from shardiff.system.processes import seconds_of_work

BUSY = 10  # silent processes that work are given this many times as long as idle ones
LOOK = 1.0  # seconds from one look at the processes to the next
SHARE = 0.02  # of a core, above which a process counts as working; waiting for others takes less
LEAST = 0.05  # seconds of CPU time below which a difference means nothing: the kernel's clock ticks in hundredths


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
        before, self.worked = self.worked, [seconds_of_work(pid) for pid in self.pids]
        least, self.looked = max(LEAST, SHARE * (now - self.looked)), now
        if before is None:
            return False
        if max(map(float.__sub__, self.worked, before), default=0.0) > least:
            self.idle_since = now
        return now - self.idle_since > self.timeout - look or now - self.since > BUSY * self.timeout


@contextmanager
def watched(what: str, timeout: float) -> Iterator[None]:
    """End this process with status 3, and say where it is, when the block neither ends nor works for `timeout` seconds.

    This is for what runs here and not in ranks: XLA with all devices in one process. Nothing gentler ends a thread that
    waits in C++. Other processes that this one has started notice that it is gone.
    """
    over, thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        silence = Silence(timeout, [os.getpid()])
        while not over.wait(LOOK / 2):
            if silence.over():
                stack = "".join(traceback.format_stack(sys._current_frames()[thread]))
                cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # which a progress bar hides
                print(f"{cursor}{stack}\nshardiff: {what} is stuck: no sign of life for {timeout:g} s", file=sys.stderr)
                sys.stderr.flush()
                os._exit(3)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
