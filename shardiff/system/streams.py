"""Standard input and output as they may be found: closed, full, with nobody at the other end, or knowing ASCII only."""

from __future__ import annotations

import io
import os
import sys


def prepare() -> None:
    """Give a process started without stdin, stdout or stderr a file there, lest another or a socket take the number.

    What standard output cannot encode is replaced: names of files may be no text, terminals may know ASCII only.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    sys.stdin = sys.stdin or open(0, closefd=False)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def drop_output() -> None:
    """Where standard output cannot be written, let what is left for it go nowhere: the interpreter's end would fail."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
