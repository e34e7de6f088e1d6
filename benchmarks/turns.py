"""Sets of rank processes, of torch and of JAX, that stay while they take turns.

torch and JAX cannot share a process, and two sets at work at once would disturb each other. So both are started once,
each rank serves requests over a socket, and the caller asks one set at a time: whatever the machine does meanwhile hits
both alike. A rank that waits for its turn sleeps in a read.

A request is (name, arguments): a function of the ranks' module, called with the rank's state first. All ranks of a set
get the same requests, and the caller gets a list of results by rank.
"""

from __future__ import annotations

import importlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

BEAT = 10.0  # seconds after which a waiting torch rank shows its launcher that it lives
LONG = 24 * 3600.0  # for launchers that limit a call as a whole: `Ranks.call` limits every request instead


@dataclass
class Ranks:
    """A set of ranks. timeout: seconds that one request may take."""

    connections: list[Connection]
    launched: Future[Any]
    timeout: float

    def call(self, name: str, *args: Any) -> list[Any]:
        """name(state, *args) in every rank. Raises what the launcher raises when a rank fails, or TimeoutError."""
        for connection in self.connections:
            self._or_failure(lambda connection=connection: connection.send((name, args)))
        results: dict[Connection, Any] = {}
        deadline = time.monotonic() + self.timeout
        while len(results) < len(self.connections):
            ready = wait([c for c in self.connections if c not in results], deadline - time.monotonic())
            if not ready:
                raise TimeoutError(f"{name} took longer than {self.timeout:g} s")
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
    """Ranks of torch_impl.launch, each with a state made by `module.State(device)`."""
    from torch_impl import launch

    with _set(world_size, timeout) as (address, executor, gather):
        with launch.workers(world_size, device, timeout) as pool:
            yield from gather(executor.submit(pool.call, torch_rank, address, module))


@contextmanager
def jax_ranks(world_size: int, module: str, device: str, timeout: float) -> Iterator[Ranks]:
    """Ranks of jax_impl.launch, each with a state made by `module.State()`."""
    from jax_impl import launch

    with _set(world_size, timeout) as (address, executor, gather):
        with launch.workers(world_size, device, LONG) as pool:
            yield from gather(executor.submit(pool.call, jax_rank, address, module))


@contextmanager
def _set(world_size: int, timeout: float) -> Iterator[tuple[str, ThreadPoolExecutor, Callable[..., Iterator[Ranks]]]]:
    """An address that ranks connect to, a thread for the launcher, and what yields the ranks and ends them."""
    with (
        tempfile.TemporaryDirectory(prefix="shardiff-", ignore_cleanup_errors=True) as directory,
        socket.socket(socket.AF_UNIX) as listener,
        ThreadPoolExecutor(1) as executor,  # left after the launcher's pool, which ends the call in this thread
    ):
        address = str(Path(directory, "turns"))
        listener.bind(address)
        listener.listen(world_size)
        listener.settimeout(0.2)

        def gather(launched: Future[Any]) -> Iterator[Ranks]:
            by_rank: dict[int, Connection] = {}
            deadline = time.monotonic() + timeout
            while len(by_rank) < world_size:
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    if launched.done():
                        launched.result()
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{world_size - len(by_rank)} of {world_size} ranks did not start") from None
                    continue
                peer.setblocking(True)
                connection = Connection(peer.detach())
                by_rank[connection.recv()] = connection
            connections = [by_rank[rank] for rank in range(world_size)]
            try:
                yield Ranks(connections, launched, timeout)
                for connection in connections:
                    connection.send(None)
                launched.result(timeout)
            finally:
                for connection in connections:
                    connection.close()

        yield address, executor, gather


def torch_rank(device: Any, address: str, module: str) -> None:
    """What a torch rank runs."""
    import torch.distributed as dist

    from torch_impl.launch import report_phase

    functions = importlib.import_module(module)
    serve(address, dist.get_rank(), functions, functions.State(device), report_phase)


def jax_rank(address: str, module: str) -> None:
    """What a JAX rank runs."""
    import jax

    functions = importlib.import_module(module)
    serve(address, jax.process_index(), functions, functions.State())


def serve(
    address: str, rank: int, functions: Any, state: Any, alive: Callable[[str], None] = lambda phase: None
) -> None:
    """Answer requests until there are no more. An error ends the rank, and its launcher tells the caller."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        connection = Connection(sock.detach())
    connection.send(rank)
    while True:
        while not connection.poll(BEAT):
            alive("its turn")
        request = connection.recv()
        if request is None:
            return
        name, args = request
        alive(name)
        connection.send(getattr(functions, name)(state, *args))
