"""What `shardiff.ranks.jax_pool` starts: a rank's process. `launch` is the caller's side."""

from __future__ import annotations

import faulthandler
import functools
import importlib
import inspect
import os
import pickle
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from shardiff.ranks.processes import ITS_TURN, Notes, report, when_parent_ends, where
from shardiff.ranks.watch import receive, send

SECONDARY = ("loo", "onnection", "oordination", "distributed service", "NCCL")  # in errors another rank may have caused


@dataclass(frozen=True)
class Start:
    """What every rank of a pool is told. notes: a file; directory: for temporary files."""

    world_size: int
    port: int
    device: str
    threads: int
    timeout: float
    notes: Path
    directory: str


class Rank:
    """The process of one rank: its socket to the caller, and its note in the file that all processes map."""

    def __init__(self, rank: int, start: Start) -> None:
        self.socket, self.notes = socket.socket(fileno=os.dup(0)), Notes(start.notes, rank)
        self.directory, self.lock = start.directory, threading.Lock()
        self.jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def report_phase(self, phase: str) -> None:
        self.notes.phase(phase)

    def send(self, *message: Any) -> None:
        with self.lock:
            send(self.socket, message)

    def obey(self) -> NoReturn:
        """A thread: take what the caller sends until it is gone; then end, with all that this rank has started."""
        with suppress(EOFError, OSError):
            while True:
                message = receive(self.socket)
                if message == "where":
                    self.send("stack", *where(threading.get_ident(), __file__, waits))
                else:
                    self.jobs.put(message)
        leave(self.directory)


_this_rank: Rank | None = None


def report_phase(name: str) -> None:
    """Note what this rank does now: start-up, rendezvous, call, compile, run, teardown. Takes a microsecond."""
    if _this_rank is not None:
        _this_rank.report_phase(name)


def run(rank: int, start: Start) -> NoReturn:
    """A rank's process: start jax, then run what the caller sends until it is gone."""
    global _this_rank
    when_parent_ends(signal.SIGCONT)  # should it be stopped when the caller ends, it goes on, to end itself
    try:
        this = _this_rank = Rank(rank, start)
    except FileNotFoundError:  # the caller's files went with it
        leave(start.directory)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    sys.stdout = open(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # gloo prints to standard output that its ranks are connected
    faulthandler.enable(all_threads=False)
    threading.Thread(target=this.obey, daemon=True).start()
    try:
        this.report_phase("start-up")
        start_jax(rank, start)
        while True:
            this.report_phase(ITS_TURN)
            job = this.jobs.get()
            this.report_phase("call")
            function, args = pickle.loads(job)
            result = function(*args)
            this.report_phase("teardown")
            this.send("result", result)
            del function, args, job, result
    except BaseException as error:
        this.send("error", time.monotonic(), this.notes.now, *report(error, SECONDARY))
    while True:
        signal.pause()  # the caller ends it


def leave(directory: str) -> NoReturn:
    """End this rank with all that it has started: the caller is gone."""
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


def start_jax(rank: int, start: Start) -> None:
    """Join the other ranks, with one device."""
    from shardiff.ranks import jax_devices as devices

    for name in {"lo", "lo0"}.intersection(name for _, name in socket.if_nameindex()):
        os.environ["NCCL_SOCKET_IFNAME"] = name
    with devices.quiet_stderr():
        import jax

        from shardiff.ranks import jax_notes as last_program

        with suppress(ImportError, AttributeError):  # gloo listens at the host's name, and jax has no option for it
            lib = importlib.import_module("jax._src.lib")._jax
            lib.make_gloo_tcp_collectives = functools.partial(lib.make_gloo_tcp_collectives, hostname="127.0.0.1")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        here = f"127.0.0.1:{start.port}"
        # Longer than the caller's patience, who says more.
        limits = dict.fromkeys(("initialization_timeout", "heartbeat_timeout_seconds"), int(start.timeout) + 300)
        known = inspect.signature(jax.distributed.initialize).parameters
        report_phase("rendezvous")
        jax.distributed.initialize(
            here,
            start.world_size,
            rank,
            local_device_ids=[rank] if start.device == "cuda" else None,
            cluster_detection_method="deactivate",
            coordinator_bind_address=here,
            **{name: limit for name, limit in limits.items() if name in known},
        )
    devices.prepare(1, start.device)
    report_phase("start-up")
    if _this_rank is not None:
        last_program.watch(_this_rank.notes.call, report_phase)


def waits(stack: str) -> bool:
    """Whether the stack is that of a thread that waits for a program, which waits for other ranks."""
    innermost = [line for line in stack.splitlines() if line.startswith("  File ")][-1:]
    return any("/jax/" in line or "last_program.py" in line for line in innermost)
