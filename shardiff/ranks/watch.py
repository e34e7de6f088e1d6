"""Watch the ranks of a call until all have their results, or some have failed, or all are stuck."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from shardiff.ranks.messages import send, take
from shardiff.ranks.notes import ITS_TURN, read_notes
from shardiff.ranks.silence import Silence
from shardiff.ranks.verdict import RankState
from shardiff.system.processes import is_stopped

Progress = Callable[[int, Any], object]  # called with a rank and what it reported
SETTLE, GRACE = 0.3, 5.0  # seconds that others have to fail too: after an error of a rank's own; after a secondary one
ANSWER = 2.0  # seconds at most, out of the timeout, that a stuck rank has to say where it is
SPARE = 3.0  # seconds that ending all ranks may take, out of a timeout of ten times as many or more


def patience(timeout: float) -> float:
    """How much of a timeout is for waiting; the rest is for ending what did not answer."""
    return timeout - (SPARE if timeout >= 10 * SPARE else 0)


def watch(ranks: Sequence[RankState], notes: Path, timeout: float, on_progress: Progress | None, stay: bool) -> None:
    """Fill in `ranks` until all have sent results and are gone, or some have failed, or all are stuck.

    stay: the ranks stay for another call, so that a call is over when all have sent results.
    """
    answer = min(ANSWER, timeout / 4)
    silence = Silence(patience(timeout) - answer, [rank.pid for rank in ranks])
    end, asked, before = math.inf, False, None
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


def _tell(ranks: Sequence[RankState], message: str) -> None:
    for rank in ranks:
        with suppress(OSError):
            send(rank.socket, message)


def _messages(ranks: Sequence[RankState]) -> Iterator[tuple[RankState, str, Sequence[Any]]]:
    """(rank, kind, content) of the messages that come within a moment."""
    by_socket = {rank.socket: rank for rank in ranks if not rank.gone}
    for sock in wait(list(by_socket), 0.2):
        rank = by_socket[sock]  # pyright: ignore[reportArgumentType]
        try:
            chunk = rank.socket.recv(1 << 20)
        except ConnectionError:
            chunk = b""
        if not chunk:
            yield rank, "gone", ()
        rank.inbox += chunk
        for kind, *content in take(rank.inbox):
            yield rank, kind, content
