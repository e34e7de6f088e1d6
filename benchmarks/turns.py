"""Sets of rank processes, of torch and of JAX, that stay while they take turns.

torch and JAX cannot share a process, and two sets at work at once would disturb each other. So both are started once,
each rank answers requests over a socket, and the caller asks one set at a time: whatever the machine does meanwhile
affects both alike. A rank that waits for its turn sleeps in a read.

A request is (name, arguments): a function of the ranks' module, called with the rank's state first. All ranks of a set
get the same requests, and the caller gets a list of results by rank.
"""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.pools import workers
from shardiff.ranks.notes import ITS_TURN
from shardiff.ranks.rank import report_phase, this_rank

BEFORE_FORK = ("torch._dynamo",)  # for ranks of torch that have an optimizer


@dataclass
class Ranks:
    """A set of ranks. launched: the pool's call, which fails when a rank fails or all are silent."""

    connections: list[Connection]
    launched: Future[Any]

    def call(self, name: str, *args: Any) -> list[Any]:
        """name(state, *args) in every rank. Raises WorkerError, the pool's, when a rank fails or is stuck."""
        for connection in self.connections:
            self._or_failure(lambda connection=connection: connection.send((name, args)))
        results: dict[Connection, Any] = {}
        while len(results) < len(self.connections):
            ready = wait([c for c in self.connections if c not in results], 0.2)
            if not ready and self.launched.done():
                self.launched.result()
            for connection in ready:
                assert isinstance(connection, Connection)
                results[connection] = self._or_failure(connection.recv)
        return [results[connection] for connection in self.connections]

    def _or_failure(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except (EOFError, OSError):
            self.launched.result(timeout=60)  # the pool knows which rank failed, and how
            raise


@contextmanager
def ranks(framework: str, world_size: int, module: str, device: str, timeout: float) -> Iterator[Ranks]:
    """Ranks of "torch" or "jax". Each has a state: `module.State(device)` in torch, `module.State()` in JAX, where a
    process knows its device."""
    with (
        socket.socket(socket.AF_UNIX) as listener,
        listening(listener) as address,
        ThreadPoolExecutor(1) as executor,  # left after the pool, which ends the call in this thread
        workers(framework, world_size, device, timeout) as pool,
        ExitStack() as stack,
    ):
        launched = executor.submit(pool.call, serve, address, module)
        connections = [stack.enter_context(one) for one in connected(listener, world_size, launched)]
        yield Ranks(connections, launched)
        for connection in connections:
            connection.send(None)
        launched.result()


def connected(listener: socket.socket, world_size: int, launched: Future[Any]) -> list[Connection]:
    """The connections of all ranks, by rank. Raises what the pool raises if a rank fails first."""
    listener.settimeout(0.2)
    by_rank: dict[int, Connection] = {}
    while len(by_rank) < world_size:
        try:
            peer, _ = listener.accept()
        except TimeoutError:
            if launched.done():
                launched.result()
            continue
        peer.setblocking(True)
        connection = Connection(peer.detach())
        by_rank[connection.recv()] = connection
    return [by_rank[rank] for rank in range(world_size)]


@contextmanager
def listening(listener: socket.socket) -> Iterator[str]:
    """Listen at an address that only this user's processes can connect to.

    On Linux it has no name that could be left behind: a file descriptor stands for it.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardiff-", ignore_cleanup_errors=True))
        address = f"{directory}/turns"
        listener.bind(address)
        listener.listen()
        if sys.platform == "linux":
            fd = os.open(address, os.O_PATH)
            stack.callback(os.close, fd)
            address = f"/proc/{os.getpid()}/fd/{fd}"
            shutil.rmtree(directory)
        yield address


def serve(*args: Any) -> None:
    """What a rank runs: answer requests until there are no more. An error ends the rank, and its pool tells the caller.

    args: what the ranks' State takes, then the caller's address and the ranks' module.
    """
    *given, address, module = args
    functions, this = importlib.import_module(module), this_rank()
    assert this is not None
    state = functions.State(*given)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        connection = Connection(sock.detach())
    connection.send(this.rank)
    while True:
        report_phase(ITS_TURN)
        request = connection.recv()
        if request is None:
            return
        name, values = request
        report_phase(name)
        connection.send(getattr(functions, name)(state, *values))
