"""Ctrl-C that is never lost, and never aborts the process.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a callback of the garbage collector (jax has
one, and most signals that come while XLA works are seen there) it is printed and lost; while C++ code initializes an
extension module it aborts the process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SWALLOWING = ("_xla_gc_callback", "__del__")  # functions that no exception leaves


@contextmanager
def reliable_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C as usual, but a moment later where it would be lost."""

    def handle(signum: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_name not in SWALLOWING:
            frame = frame.f_back
        if frame is None:
            raise KeyboardInterrupt
        again = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    with _handling(handle):
        yield


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block, which should be short. For imports of C++ libraries."""
    came: list[int] = []
    try:
        with _handling(lambda signum, frame: came.append(signum)):
            yield
    finally:
        if came:
            raise KeyboardInterrupt


@contextmanager
def _handling(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have `handle` handle SIGINT, unless this is not the main thread, or the signal is ignored, as under nohup."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
