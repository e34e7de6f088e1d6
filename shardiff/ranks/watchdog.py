"""A watch on this process itself, for what runs in it and not in ranks: XLA with the devices of one process."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from shardiff.ranks.processes import Silence

LOOK = 0.5  # seconds


@contextmanager
def watched(what: str, timeout: float) -> Iterator[None]:
    """End the process with status 3, and say where it is, when the block neither ends nor works for `timeout` seconds.

    What other processes it has started notice that it is gone. Nothing gentler ends a thread that waits in C++.
    """
    over, thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        silence = Silence(timeout, [os.getpid()])
        while not over.wait(LOOK):
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
