"""Files from outside: the whole content, or one line that says why it cannot be read.

Reading neither waits forever, as for a pipe that no process writes to, nor takes more than memory can hold.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import stat
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from shardiff.system.memory import address_space
from shardiff.system.words import size

FACTOR = 4  # memory that a file takes once it is read, in multiples of its size
ENDLESS = 2**26  # bytes after which a device, such as /dev/zero, is taken to be endless
PATIENCE = 5.0  # seconds that a process has to begin to write to a pipe
CHUNK = 2**20
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Unreadable(ValueError):
    """A file that cannot be read. The message is one line that starts with its name."""


class NotJson(Unreadable):
    """A file that can be read, but does not hold JSON."""


def most_bytes() -> int:
    """The most bytes that can be read here."""
    return address_space() // FACTOR


def one_line(text: object) -> str:
    """Any text in one line."""
    return " ".join(str(text).split())


def read_bytes(path: str | Path, patience: float = PATIENCE) -> bytes:
    """A file's content; "-" is standard input. Raises Unreadable."""
    name = "<stdin>" if str(path) == "-" else str(path)
    try:
        fd = os.dup(0) if name == "<stdin>" else os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0) as file:
            start = b"" if name == "<stdin>" else _beginning(fd, patience)
            return _content(file, bytearray(start), most_bytes())
    except FileNotFoundError:
        raise Unreadable(f"{one_line(name) or repr(name)}: no such file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Unreadable(f"{one_line(name)}: cannot be read: {reason}") from None


def _beginning(fd: int, patience: float) -> bytes:
    """Wait for a process that writes to a pipe; what has been read of it meanwhile. Raises ValueError if none comes.

    The descriptor was opened so that it does not block, and blocks from then on.
    """
    piece = b""
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(1000 * patience):
            try:
                piece = os.read(fd, CHUNK)
                if not piece:
                    raise ValueError(f"a pipe to which no process has written for {patience:g} s")
            except BlockingIOError:  # a process has it open, and may still write
                pass
    os.set_blocking(fd, True)
    return piece


def _content(file: FileIO, content: bytearray, most: int) -> bytes:
    """`content` and all that an open file has after it. Raises ValueError if that is more than `most` bytes."""
    info = os.fstat(file.fileno())
    if stat.S_ISREG(info.st_mode) and info.st_size > most:
        _too_large(info.st_size)
    endless = stat.S_ISCHR(info.st_mode) and not file.isatty()
    while piece := file.read(CHUNK):
        content += piece
        if endless and len(content) > ENDLESS:
            raise ValueError("an endless device, not a file")
        if len(content) > most:
            _too_large(len(content))
    return bytes(content)


def _too_large(count: int) -> NoReturn:
    raise ValueError(
        f"{size(count)} need {size(FACTOR * count)} of memory, but only {size(address_space())} is available"
    )


def read_json(path: Path) -> Any:
    """The JSON in a file. Raises Unreadable; or NotJson if it is not JSON, or not the same JSON to all readers.

    The latter are NaN, Infinity, numbers too large for a float, an object with the same key twice, and half of a
    surrogate pair.
    """
    data = read_bytes(path)
    try:
        text = data.decode(json.detect_encoding(data))
        content = json.loads(text, parse_float=_finite, parse_constant=_no_number, object_pairs_hook=_unique)
        if SURROGATE.search(text):
            json.dumps(
                content, ensure_ascii=False
            ).encode()  # raises if half of a pair stands alone, which no file can hold
        return content
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise NotJson(f"{one_line(path)}: not JSON: {reason}") from None


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is too large for a float")
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same key twice")
    return found
