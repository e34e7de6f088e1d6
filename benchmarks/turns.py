"""Sets of rank processes, of torch and of JAX, that stay while they take turns.

torch and JAX cannot share a process, and two sets at work at once would disturb each other. So both are started once,
each rank serves requests over a socket, and the caller asks one set at a time: whatever the machine does meanwhile hits
both alike. A rank that waits for its turn sleeps in a read.

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

from shardiff.ranks.processes import ITS_TURN


@dataclass
class Ranks:
    """A set of ranks. launched: the launcher's call, which fails when a rank fails or all are silent."""

    connections: list[Connection]
    launched: Future[Any]

    def call(self, name: str, *args: Any) -> list[Any]:
        """name(state, *args) in every rank. Raises what the launcher raises when a rank fails or is stuck."""
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
            self.launched.result(timeout=60)  # the launcher knows which rank failed, and how
            raise


@contextmanager
def torch_ranks(world_size: int, module: str, device: str, timeout: float) -> Iterator[Ranks]:
    """Ranks of shardiff.ranks.torch_pool, each with a state made by `module.State(device)`."""
    from shardiff.ranks import torch_pool as launch

    with _set(world_size) as (address, executor, gather):
        with launch.workers(world_size, device, timeout) as pool:
            yield from gather(executor.submit(pool.call, torch_rank, address, module))


@contextmanager
def jax_ranks(world_size: int, module: str, device: str, timeout: float) -> Iterator[Ranks]:
    """Ranks of shardiff.ranks.jax_pool, each with a state made by `module.State()`."""
    from shardiff.ranks import jax_pool as launch

    with _set(world_size) as (address, executor, gather):
        with launch.workers(world_size, device, timeout) as pool:
            yield from gather(executor.submit(pool.call, jax_rank, address, module))


@contextmanager
def _set(world_size: int) -> Iterator[tuple[str, ThreadPoolExecutor, Callable[..., Iterator[Ranks]]]]:
    """An address that ranks connect to, a thread for the launcher, and what yields the ranks and ends them."""
    with (
        socket.socket(socket.AF_UNIX) as listener,
        listening(listener) as address,
        ThreadPoolExecutor(1) as executor,  # left after the launcher's pool, which ends the call in this thread
    ):
        listener.settimeout(0.2)

        def gather(launched: Future[Any]) -> Iterator[Ranks]:
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
            connections = [by_rank[rank] for rank in range(world_size)]
            try:
                yield Ranks(connections, launched)
                for connection in connections:
                    connection.send(None)
                launched.result()
            finally:
                for connection in connections:
                    connection.close()

        yield address, executor, gather


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


def torch_rank(device: Any, address: str, module: str) -> None:
    """What a torch rank runs."""
    import torch.distributed as dist

    from shardiff.ranks.torch_pool import report_phase

    functions = importlib.import_module(module)
    serve(address, dist.get_rank(), functions, functions.State(device), report_phase)


def jax_rank(address: str, module: str) -> None:
    """What a JAX rank runs."""
    import jax

    from shardiff.ranks.jax_pool import report_phase

    functions = importlib.import_module(module)
    serve(address, jax.process_index(), functions, functions.State(), report_phase)


def serve(address: str, rank: int, functions: Any, state: Any, report_phase: Callable[[str], None]) -> None:
    """Answer requests until there are no more. An error ends the rank, and its launcher tells the caller."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        connection = Connection(sock.detach())
    connection.send(rank)
    while True:
        report_phase(ITS_TURN)
        request = connection.recv()
        if request is None:
            return
        name, args = request
        report_phase(name)
        connection.send(getattr(functions, name)(state, *args))
