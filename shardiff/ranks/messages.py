"""Messages between a rank and its caller, over a Unix socket.

    from a rank    ("progress", value) ("result", value) ("error", when, phase, traceback, secondary)
                   ("stack", text, waiting), asked for by "where"
    to a rank      the path of a file, which holds a call's pickled (function, arguments); "where"; "release"

Standard library only: every rank imports it before anything else.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any

LENGTH = struct.Struct("!Q")


def send(sock: socket.socket, message: Any) -> None:
    """A message is its length, 8 bytes, and its pickle."""
    data = pickle.dumps(message, 5)
    sock.sendall(LENGTH.pack(len(data)))
    sock.sendall(data)


def receive(sock: socket.socket) -> Any:
    """The next message. Raises EOFError when the other side is gone."""
    (size,) = LENGTH.unpack(_read(sock, LENGTH.size))
    return pickle.loads(_read(sock, size))


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    with memoryview(data) as rest:
        while rest:
            if not (count := sock.recv_into(rest)):
                raise EOFError("the other side is gone")
            rest = rest[count:]
    return data


def take(inbox: bytearray) -> Iterator[Any]:
    """Remove the messages that have come whole from an inbox; an incomplete one stays there."""
    while len(inbox) >= LENGTH.size:
        end = LENGTH.size + LENGTH.unpack_from(inbox)[0]
        if len(inbox) < end:
            return
        with memoryview(inbox) as view:
            message = pickle.loads(view[LENGTH.size : end])
        del inbox[:end]
        yield message
