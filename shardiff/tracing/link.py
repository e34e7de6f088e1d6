"""Between a process and the verifier: a Unix socket, and JSON, an object a line. Needs no torch.

A process says {"begin": {...}}, {"call": {...}}, {"hold": position}, and {"end": true} if it ends well. The one answer
is a byte: a held process may go on. A connection that the verifier closes means that none will.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from shardiff.tracing.calls import Call, encoded
from shardiff.tracing.stacks import answer
from shardiff.tracing.verifier import Verdict, Verifier


class StoppedError(RuntimeError):
    """The verifier has found that the program cannot go on, or is gone."""


class Link:
    """A process's side. rank: as which it was started, if at all. It finds itself again after a fork."""

    def __init__(self, path: str, directory: str, rank: int | None) -> None:
        self.path, self.directory = path, directory
        self.socket: socket.socket | None = None
        self.sending, self.waiting = threading.Lock(), threading.Lock()
        self.connect(rank)
        os.register_at_fork(after_in_child=self.forget)

    def connect(self, rank: int | None) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.connect(self.path)
        except OSError as error:
            raise StoppedError("the verifier is gone") from error
        self.send({"begin": {"rank": rank, "stack": answer(self.directory)}})

    def forget(self) -> None:
        """In a forked child: the connection is the parent's."""
        if self.socket is not None:
            self.socket.close()
        self.socket = None
        self.sending, self.waiting = threading.Lock(), threading.Lock()

    def tell(self, call: Call) -> None:
        """Announce a call that is about to be made."""
        if self.socket is None:
            self.connect(None)
        self.send({"call": call.to_json()})

    def hold(self, position: int) -> None:
        """Wait until this process's call of that position can go on. Raises StoppedError if it cannot."""
        assert self.socket is not None, "it has told of this call"
        with self.waiting, suppress(ConnectionError):
            self.send({"hold": position})
            if self.socket.recv(1):
                return
        raise StoppedError("the ranks disagree, or wait for each other")

    def send(self, message: dict[str, Any]) -> None:
        assert self.socket is not None
        try:
            with self.sending:
                self.socket.sendall(encoded(message))
        except ConnectionError as error:
            raise StoppedError("the verifier is gone") from error

    def end(self, well: bool) -> None:
        """No more calls will come."""
        if self.socket is not None:
            if well:
                with suppress(StoppedError):
                    self.send({"end": True})
            self.socket.close()


@dataclass(eq=False)  # each its own key
class Connection:
    """The verifier's side of a process."""

    socket: socket.socket
    inbox: bytes = b""
    stack: str = ""  # the file in which it answers where it is
    well: bool = False  # it has said that it ends


class Server:
    """A verifier at a Unix socket. Nothing happens but in `step`."""

    def __init__(self, listening: socket.socket, num_processes: int, timeout: float, strict: bool = False) -> None:
        self.verifier, self.timeout = Verifier(num_processes, strict), timeout
        self.selector = selectors.DefaultSelector()
        self.selector.register(listening, selectors.EVENT_READ)

    def step(self, patience: float) -> Verdict | None:
        """Do what the processes ask for, once something comes within `patience` seconds.

        Returns the verdict as soon as there is one; its `running` are files for `shardiff.tracing.stacks.ask`.
        """
        ready = [key for key, _ in self.selector.select(patience)]
        for key in sorted(ready, key=lambda key: key.data is None):  # ends before beginnings
            if key.data is None:
                self.accept(key.fileobj)
            elif not self.verifier.verdict:
                self.receive(key.data)
        self.verifier.overdue(self.timeout, time.monotonic())
        verdict = self.verifier.verdict
        return verdict and replace(verdict, running=tuple(connection.stack for connection in verdict.running))

    def started(self, pids: Sequence[int]) -> None:
        """They say so themselves."""

    def accept(self, listening: Any) -> None:
        new, _ = listening.accept()
        self.selector.register(new, selectors.EVENT_READ, Connection(new))

    def receive(self, connection: Connection) -> None:
        chunk = b""
        with suppress(ConnectionError):
            chunk = connection.socket.recv(1 << 16)
        *lines, connection.inbox = (connection.inbox + chunk).split(b"\n")
        for line in lines:
            self.obey(connection, json.loads(line))
        if not chunk:
            self.selector.unregister(connection.socket)
            connection.socket.close()
            if connection in self.verifier.processes:
                self.verifier.end(connection, failed=not connection.well)
        for free in self.verifier.released():
            with suppress(OSError):
                free.socket.send(b"!")

    def obey(self, connection: Connection, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if "begin" in message:
            connection.stack = message["begin"]["stack"]
            self.verifier.begin(connection, message["begin"]["rank"])
        elif "call" in message:
            self.verifier.call(connection, Call.from_json(message["call"]), now)
        elif "hold" in message:
            self.verifier.hold(connection, message["hold"], now)
        else:
            connection.well = True

    def idle(self) -> bool:
        """Whether all have come that had to, and are gone."""
        return self.verifier.to_come <= 0 and len(self.selector.get_map()) == 1

    def close(self) -> None:
        for key in list((self.selector.get_map() or {}).values()):  # none are left when it is closed already
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self.selector.close()


@contextmanager
def serve(path: str, num_processes: int, timeout: float, strict: bool = False) -> Iterator[Server]:
    """A verifier at this path. num_processes: those that come for certain. timeout: seconds that one may wait. strict:
    as of a Verifier."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(1024)
        server = Server(listening, num_processes, timeout, strict)
        try:
            yield server
        finally:
            server.close()
            os.unlink(path)
