"""What ranks note of what they do: in memory that their caller maps too, so that it is known when they are dead.

Standard library only: every rank imports it before anything else.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ITS_TURN = "its turn"  # the phase of a rank that waits for a request: while all ranks wait, none of them is silent

PHASE = struct.Struct("Q56s")  # number of reports, phase
CALL = struct.Struct("QQ40s72s")  # number of the call, bytes, what is called, by or with whom
SIZE = PHASE.size + CALL.size  # bytes of one rank's notes

Describe = Callable[[str], tuple[int, str]]  # a program's text -> its payload bytes, its collectives in words


class Note(NamedTuple):
    """What a rank noted last. call: "" if it has made none."""

    reports: int
    phase: str
    call: str


class Notes:
    """A rank's part of a file that the rank and its caller map."""

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

    def last_call(self) -> tuple[int, int, str, str]:
        """The call noted last: its number, bytes, what is called, by or with whom."""
        number, size, *words = CALL.unpack_from(self.memory, self.start + PHASE.size)
        what, whom = map(_text, words)
        return number, size, what, whom


def begin_notes(path: Path, count: int) -> None:
    """Make the file for the notes of so many ranks."""
    path.write_bytes((PHASE.pack(0, b"start-up") + bytes(CALL.size)) * count)


def read_notes(path: Path) -> list[Note]:
    """What every rank has noted."""
    data, notes = path.read_bytes(), []
    for start in range(0, len(data), SIZE):
        reports, phase = PHASE.unpack_from(data, start)
        number, size, what, whom = CALL.unpack_from(data, start + PHASE.size)
        call = f"{_text(what)} no. {number}, {size:,} bytes, {_text(whom)}" if number else ""
        notes.append(Note(reports, _text(phase), call))
    return notes


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
