"""The loopback interface: nothing that shardiff starts talks or listens anywhere else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

LOOPBACK = "127.0.0.1"


def loopback_only() -> dict[str, str]:
    """The environment variables that make gloo (in torch) and NCCL talk and listen on the loopback interface only."""
    interfaces = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    return {f"{backend}_SOCKET_IFNAME": name for name in interfaces for backend in ("GLOO", "NCCL")}


@contextmanager
def held_port() -> Iterator[int]:
    """A port of the loopback interface that nobody else is given while the block runs.

    gRPC binds with SO_REUSEPORT, so two coordinators on one port would not fail but mix up their ranks. A socket that
    is bound with it and never listens keeps the port from everyone who asks for a free one, and lets gRPC have it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((LOOPBACK, 0))
        yield holder.getsockname()[1]


@contextmanager
def listening_port(backlog: int = 1024) -> Iterator[tuple[int, int]]:
    """The file descriptor and the port of a socket that listens on the loopback interface, for a process to take over.

    Nobody else can take the port, and connections that come early wait."""
    with socket.create_server((LOOPBACK, 0), backlog=backlog) as server:
        yield server.fileno(), server.getsockname()[1]
