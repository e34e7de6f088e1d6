"""The rank's side of a pool, the same for every framework: it notes what it does, obeys its caller, reports errors.

Standard library only: every rank imports it before anything else.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from shardiff.ranks.messages import receive, send
from shardiff.ranks.notes import Notes

OURS = str(Path(__file__).parent) + os.sep  # the frames that lead to a user's function tell the user nothing


class Rank:
    """The process of one rank: its socket to the caller, and its notes in the memory that both map.

    waits: whether a stack is that of a thread that waits for other ranks. leave: ends this process with all that it has
    started. Raises FileNotFoundError if the caller is gone.
    """

    def __init__(
        self, rank: int, sock: socket.socket, notes: Path, waits: Callable[[str], bool], leave: Callable[[], NoReturn]
    ) -> None:
        self.rank, self.socket, self.notes, self.waits, self.leave = rank, sock, Notes(notes, rank), waits, leave
        self.lock, self.released = threading.Lock(), threading.Event()
        self.calls: queue.SimpleQueue[str] = queue.SimpleQueue()

    def report_phase(self, phase: str) -> None:
        self.notes.phase(phase)

    def send(self, *message: Any) -> None:
        with self.lock:
            send(self.socket, message)

    def next_call(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """(function, arguments) of the next call, once it comes."""
        with open(self.calls.get(), "rb") as file:
            return pickle.load(file)

    def answer(self, result: Any) -> None:
        """Send a call's result."""
        self.report_phase("teardown")
        self.send("result", result)

    def obey(self) -> None:
        """A thread: take what the caller sends until it is gone; then leave."""
        with suppress(EOFError, OSError):
            while True:
                message = receive(self.socket)
                if message == "where":
                    self.send("stack", *where(threading.get_ident(), self.waits))
                elif message == "release":
                    self.released.set()
                else:
                    self.calls.put(message)
        self.leave()


_this_rank: Rank | None = None


def this_rank() -> Rank | None:
    """The rank that this process is; None outside of a pool's ranks."""
    return _this_rank


def report_phase(name: str) -> None:
    """Note what this rank does now: start-up, rendezvous, forward, backward, update, compile, run, teardown, or any
    other word of at most 56 letters. Takes a microsecond. Outside of a pool's ranks it does nothing."""
    if _this_rank is not None:
        _this_rank.report_phase(name)


def report_progress(value: Any) -> None:
    """Send a picklable value to the caller's on_progress. Outside of a pool's ranks it does nothing."""
    if _this_rank is not None:
        _this_rank.send("progress", value)


def note_call(number: int, size: int, what: bytes, whom: bytes) -> None:
    """Note the collective, or the program, that is about to be called. Outside of a pool's ranks it does nothing."""
    if _this_rank is not None:
        _this_rank.notes.call(number, size, what, whom)


def run(rank: Rank, work: Callable[[Rank], None], signs: Sequence[str]) -> NoReturn:
    """Be this rank: do its work and end the process, or tell the caller of the error and wait to be ended.

    signs: words in the message of a RuntimeError that tell of a connection, so that another rank may have caused it.
    """
    global _this_rank
    _this_rank = rank
    threading.Thread(target=rank.obey, daemon=True).start()
    try:
        rank.report_phase("start-up")
        work(rank)
        _flush()
        os._exit(0)
    except BaseException as error:
        with suppress(OSError):  # the caller is gone, and this process will be too
            rank.send("error", time.monotonic(), rank.notes.now, *report(error, signs))
        _flush()
    while True:
        signal.pause()  # the caller ends it; others may still use this rank's connections


def _flush() -> None:
    """os._exit does not."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def where(observer: int, waits: Callable[[str], bool]) -> tuple[str, bool]:
    """The stacks of this process's threads but `observer`, and whether one of them waits for other ranks."""
    stacks: list[str] = []
    for thread, frame in sys._current_frames().items():
        if thread != observer:
            stack = [entry for entry in traceback.extract_stack(frame) if not entry.filename.startswith("<")]
            while len(stack) > 1 and stack[0].filename.startswith(OURS):
                del stack[0]
            stacks.append("".join(traceback.format_list(stack)))
    return "\n".join(stacks), any(map(waits, stacks))


def report(error: BaseException, signs: Sequence[str]) -> tuple[str, bool]:
    """The traceback of a rank's error, from where it leaves our files, and whether another rank may have caused it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next and frames.tb_frame.f_code.co_filename.startswith(OURS):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return text, isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
