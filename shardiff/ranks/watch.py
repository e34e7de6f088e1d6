"""Watch the ranks of a call, and when it fails say which rank failed first, in which phase, and how.

A rank and its caller send each other messages over a Unix socket:

    from a rank    ("progress", value) ("result", value) ("error", when, phase, traceback, secondary)
                   ("stack", text, waiting), asked for by "where"
    to a rank      "where"; what else, the launcher says
"""

from __future__ import annotations

import math
import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from shardiff.ranks.processes import ITS_TURN, Silence, WorkerError, ending, is_stopped, read_notes

Progress = Callable[[int, Any], object]  # called with a rank and what it reported
SETTLE, GRACE = 0.3, 5.0  # seconds that others have to fail too: after an error of a rank's own; after a secondary one
ANSWER = 2.0  # seconds at most, out of the timeout, that a stuck rank has to say where it is
SPARE = 3.0  # seconds that ending it all may take, out of a timeout ten times as long


@dataclass
class RankState:
    """A rank as the caller knows it."""

    rank: int
    world_size: int
    socket: socket.socket
    pid: int = 0
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
    last_words: str = ""  # what it wrote when it died

    @property
    def ended_badly(self) -> bool:
        return isinstance(self.state, int) and not (self.state == 0 and self.released)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def send(sock: socket.socket, message: Any) -> None:
    """A message is its length, 8 bytes, and its pickle."""
    data = pickle.dumps(message, 5)
    sock.sendall(struct.pack("!Q", len(data)))
    sock.sendall(data)


def receive(sock: socket.socket) -> Any:
    """The next message. Raises EOFError when the other side is gone."""
    (size,) = struct.unpack("!Q", _read(sock, 8))
    return pickle.loads(_read(sock, size))


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    with memoryview(data) as rest:
        while rest:
            if not (count := sock.recv_into(rest)):
                raise EOFError("the other side is gone")
            rest = rest[count:]
    return data


def watch(
    ranks: list[RankState], notes: Path, timeout: float, on_progress: Progress | None = None, stay: bool = False
) -> None:
    """Fill in `ranks` until all have sent results and are gone, or some have failed, or all are stuck.

    stay: the ranks stay for another call, so that all is done when all have sent results.
    """
    answer = min(ANSWER, timeout / 4)
    patience = timeout - answer - (SPARE if timeout >= 10 * SPARE else 0)
    silence, end, asked, before = Silence(patience, [rank.pid for rank in ranks]), math.inf, False, None
    while not all(rank.done if stay else rank.gone for rank in ranks):
        for rank, kind, content in _messages(ranks):
            silence.heard()
            if kind == "progress" and on_progress is not None:
                on_progress(rank.rank, *content)
            elif kind == "result":
                rank.done, rank.result = True, content[0]
            elif kind == "error":
                rank.failed_at, rank.error_phase, rank.error, rank.secondary = content
            elif kind == "stack":
                rank.stack, rank.waiting = content
            elif kind == "gone":
                now = time.monotonic()
                rank.gone, rank.failed_at = True, rank.failed_at if rank.released else min(rank.failed_at, now)
        noted = read_notes(notes)
        idle = all(note.phase == ITS_TURN for note in noted) and not any(map(is_stopped, silence.pids))
        if noted != before or idle:
            silence.heard()
        before = noted
        if not stay and all(rank.done and not rank.released for rank in ranks):
            _tell(ranks, "release")
            for rank in ranks:
                rank.released = True
        failed, now = [rank for rank in ranks if rank.failed_at < math.inf], time.monotonic()
        if failed:
            end = min(end, now + (GRACE if all(rank.secondary for rank in failed) else SETTLE))
        elif not asked and silence.over():
            asked, end = True, now + answer
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


def verdict(ranks: list[RankState], notes: Path, timeout: float) -> WorkerError | None:
    """Who failed first by its own fault, and how; None if nobody."""
    noted = read_notes(notes)
    failed = [rank for rank in ranks if rank.failed_at < math.inf or rank.ended_badly]
    running = [rank for rank in ranks if not rank.gone and not isinstance(rank.state, int)]
    stuck = [] if failed else [rank for rank in running if rank.released or not rank.done]
    if not failed and not stuck:
        return None
    if failed:
        first = min(failed, key=lambda rank: (rank.secondary, rank.failed_at))
    else:
        first = min(stuck, key=lambda rank: (rank.state != "stopped", bool(rank.stack), rank.waiting))
    phase, kind, trace = noted[first.rank].phase, "died", first.error
    if first.error:
        phase, kind = first.error_phase, "raised"
        message = f"{first} raised in phase {phase}:"
    elif failed:
        trace = first.last_words
        message = f"{first} died in phase {phase}: {ending(first.state)}"
    else:
        kind, trace = "stuck", first.stack
        how = "it is stopped" if first.state == "stopped" else "it is at" if trace else "it does not answer"
        message = f"{first} is stuck in phase {phase}: no sign of life from any rank, timeout {timeout:g} s; {how}"
    lines = [message, *(["", trace.rstrip(), ""] if trace else [])]
    for rank in failed or ranks:
        last = f"; last call: {noted[rank.rank].call or 'none'}" if stuck else ""
        what = "is stuck" if rank is first else _consequence(rank)
        if rank is not first or stuck:
            lines.append(f"{rank}, in phase {rank.error_phase or noted[rank.rank].phase}, {what}{last}")
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
