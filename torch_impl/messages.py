"""What the processes of `torch_impl.launch` tell each other, over Unix sockets and in a file that all of them map."""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

NOTE = struct.Struct("Q56s")  # a rank's part of the file `phases`: the number of its reports, and its phase
MAX_RANKS = 250  # file descriptors that one message can carry


@dataclass
class Job:
    """One call. module: the function's; payload: the pickled (function, arguments)."""

    world_size: int
    cuda: bool
    directory: str
    timeout: float
    module: str | None
    payload: bytes


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
