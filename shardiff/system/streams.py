"""Standard input and output may be closed, full, without a reader, or limited to ASCII."""

from __future__ import annotations

import io
import os
import sys


def prepare() -> None:
    """Open the null device as stdin, stdout or stderr where the process was started without, so that no other file or
    socket takes the number.

    Characters that standard output cannot encode are replaced: names of files need not be text, and a terminal may be
    limited to ASCII.
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
    """If standard output cannot be written, discard what is left for it, lest the interpreter fail at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
