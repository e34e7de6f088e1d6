"""Watch the ranks of a call, and when it fails say which rank failed first, in which phase, and how."""

from __future__ import annotations

import math
import pickle
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch_impl.messages import NOTE, send

Progress = Callable[[int, Any], object]  # called with a rank and what it reported
SETTLE, GRACE, ANSWER = 0.3, 5.0, 2.0  # seconds: after an own error; after a secondary one; for a stuck rank to answer


class WorkerError(RuntimeError):
    """A rank has failed; the message begins with that rank and its own traceback.

    kind: "raised", "died" (its process ended) or "stuck" (no sign of life). traceback: the rank's, where it has one.
    rank is None if it is the starter that failed.
    """

    def __init__(self, message: str, rank: int | None = None, phase: str = "", kind: str = "died", traceback: str = ""):
        super().__init__(message)
        self.rank, self.phase, self.kind, self.traceback = rank, phase, kind, traceback


@dataclass
class RankState:
    """A rank as the caller knows it."""

    rank: int
    world_size: int
    socket: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    result: Any = None
    done: bool = False  # has sent its result
    released: bool = False  # may leave: all have sent their results
    gone: bool = False
    failed_at: float = math.inf  # time.monotonic(), one clock for all processes
    error_phase: str = ""
    error: str = ""
    secondary: bool = False  # the error may be the consequence of another rank's
    stack: str = ""  # where it is when all are stuck
    waiting: bool = False  # and that it waits for others there
    state: int | str | None = None  # exit code, negative for a signal; "stopped"; None if it was running to the end

    @property
    def ended_badly(self) -> bool:
        return isinstance(self.state, int) and not (self.state == 0 and self.released)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def watch(ranks: list[RankState], directory: Path, timeout: float, on_progress: Progress | None) -> None:
    """Fill in `ranks` until all have sent results and are gone, or some have failed, or all are stuck."""
    alive, end, asked, notes = time.monotonic(), math.inf, False, b""
    while not all(rank.gone for rank in ranks):
        for rank, kind, content in _messages(ranks):
            alive = time.monotonic()
            if kind == "progress" and on_progress is not None:
                on_progress(rank.rank, *content)
            elif kind == "result":
                rank.done, rank.result = True, content[0]
            elif kind == "error":
                rank.failed_at, rank.error_phase, rank.error, rank.secondary = content
            elif kind == "stack":
                rank.stack, rank.waiting = content
            elif kind == "gone":
                rank.gone, rank.failed_at = True, rank.failed_at if rank.released else min(rank.failed_at, alive)
        previous, notes = notes, (directory / "phases").read_bytes()
        if notes != previous:
            alive = time.monotonic()
        if all(rank.done and not rank.released for rank in ranks):
            _tell(ranks, "release")
            for rank in ranks:
                rank.released = True
        failed, now = [rank for rank in ranks if rank.failed_at < math.inf], time.monotonic()
        if failed:
            end = min(end, now + (GRACE if all(rank.secondary for rank in failed) else SETTLE))
        elif not asked and now - alive > timeout:
            asked, end = True, now + ANSWER
            _tell(ranks, "where")
        if now > end or len(failed) == len(ranks) or (asked and all(rank.stack or rank.gone for rank in ranks)):
            return


def _tell(ranks: list[RankState], message: str) -> None:
    for rank in ranks:
        with suppress(OSError):
            send(rank.socket, message)


def _messages(ranks: list[RankState]) -> Iterator[tuple[RankState, str, Sequence[Any]]]:
    """(rank, kind, content) of the messages that come within a moment; an incomplete one stays in the inbox."""
    for sock in wait([rank.socket for rank in ranks if not rank.gone], 0.2):
        rank = next(rank for rank in ranks if rank.socket is sock)
        try:
            chunk = rank.socket.recv(1 << 20)
        except ConnectionError:
            chunk = b""
        if not chunk:
            yield rank, "gone", ()
        rank.inbox += chunk
        while len(rank.inbox) >= 8 and len(rank.inbox) - 8 >= (size := struct.unpack_from("!Q", rank.inbox)[0]):
            with memoryview(rank.inbox) as view:
                kind, *content = pickle.loads(view[8 : 8 + size])
            del rank.inbox[: 8 + size]
            yield rank, kind, content


def verdict(ranks: list[RankState], directory: Path, timeout: float) -> WorkerError | None:
    """Who failed first by its own fault, and how; None if nobody."""
    notes = NOTE.iter_unpack((directory / "phases").read_bytes())
    phases = [phase.rstrip(b"\0").decode(errors="replace") for _, phase in notes]
    failed = [rank for rank in ranks if rank.failed_at < math.inf or rank.ended_badly]
    running = [rank for rank in ranks if not rank.gone and not isinstance(rank.state, int)]
    stuck = [] if failed else [rank for rank in running if rank.released or not rank.done]
    if not failed and not stuck:
        return None
    if failed:
        first = min(failed, key=lambda rank: (rank.secondary, rank.failed_at))
    else:
        first = min(stuck, key=lambda rank: (bool(rank.stack), rank.waiting))
    phase, kind, trace = phases[first.rank], "died", first.error
    if first.error:
        phase, kind = first.error_phase, "raised"
        message = f"{first} raised in phase {phase}:"
    elif failed:
        fault = directory / f"fault-{first.rank}"
        trace = fault.read_text() if fault.exists() else ""
        message = f"{first} died in phase {phase}: {ending(first.state)}"
    else:
        kind, trace = "stuck", first.stack
        how = "it is stopped" if first.state == "stopped" else "it is at" if trace else "it does not answer"
        message = f"{first} is stuck in phase {phase}: no sign of life from any rank for {timeout:g} s; {how}"
    lines = [message, *(["", trace.rstrip(), ""] if trace else [])]
    for rank in failed or ranks:
        if rank is not first:
            lines.append(f"{rank}, in phase {rank.error_phase or phases[rank.rank]}, {_consequence(rank)}")
    return WorkerError("\n".join(lines), first.rank, phase, kind, trace)


def _consequence(rank: RankState) -> str:
    """What became of a rank that is not the one to blame."""
    if rank.error:
        return "failed to communicate" if rank.secondary else f"raised {rank.error.rstrip().splitlines()[-1]}"
    if rank.gone:
        return f"died: {ending(rank.state)}"
    if rank.done:
        return "has its result"
    return "waits for others" if rank.waiting else "is stuck too"


def ending(state: int | str | None) -> str:
    if not isinstance(state, int):
        return "it closed its connection"
    if state == -signal.SIGKILL:
        return "killed by SIGKILL, perhaps for lack of memory"
    return f"killed by {signal.Signals(-state).name}" if state < 0 else f"it exited with status {state}"
