"""Which rank failed first by its own fault, and how: what a caller is told when a call fails."""

from __future__ import annotations

import math
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardiff.ranks.notes import Note


class WorkerError(RuntimeError):
    """A rank has failed; the message begins with that rank and its own traceback.

    kind: "raised", "died" (its process ended) or "stuck" (no sign of life). traceback: the rank's, where it has one.
    rank is None if the process that starts the ranks is what failed.
    """

    def __init__(
        self, message: str, rank: int | None = None, phase: str = "", kind: str = "died", traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.rank, self.phase, self.kind, self.traceback = rank, phase, kind, traceback


@dataclass
class RankState:
    """A rank as the caller knows it."""

    rank: int
    world_size: int
    socket: socket.socket
    pid: int = 0
    inbox: bytearray = field(default_factory=bytearray)
    result: object = None
    done: bool = False  # has sent its result
    released: bool = False  # may leave: all have sent their results
    gone: bool = False
    failed_at: float = math.inf  # time.monotonic(), one clock for all processes
    error_phase: str = ""
    error: str = ""
    secondary: bool = False  # the error may be the consequence of another rank's
    stack: str = ""  # where it is when all are stuck
    waiting: bool = False  # and whether it waits for others there
    state: int | str | None = None  # exit code, negative for a signal; "stopped"; None if it was running to the end
    last_words: str = ""  # what it wrote when it died

    @property
    def ended_badly(self) -> bool:
        return isinstance(self.state, int) and not (self.state == 0 and self.released)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def verdict(ranks: Sequence[RankState], noted: Sequence[Note], timeout: float) -> WorkerError | None:
    """Who failed first by its own fault, and how; None if nobody did. noted: what every rank noted last."""
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
        what = "is stuck" if rank is first else consequence(rank)
        if rank is not first or stuck:
            lines.append(f"{rank}, in phase {rank.error_phase or noted[rank.rank].phase}, {what}{last}")
    return WorkerError("\n".join(lines), first.rank, phase, kind, trace)


def consequence(rank: RankState) -> str:
    """What became of a rank that is not the one to blame."""
    if rank.error:
        return "failed to communicate" if rank.secondary else f"raised {rank.error.rstrip().splitlines()[-1]}"
    if rank.gone:
        return f"died: {ending(rank.state)}"
    if rank.done:
        return "has its result"
    return "waits for others" if rank.waiting else "is stuck too"


def ending(state: int | str | None) -> str:
    """An exit code, negative for a signal, in words."""
    if not isinstance(state, int):
        return "it closed its connection"
    if state == -signal.SIGKILL:
        return "killed by SIGKILL, perhaps for lack of memory"
    return f"killed by {signal.Signals(-state).name}" if state < 0 else f"it exited with status {state}"
