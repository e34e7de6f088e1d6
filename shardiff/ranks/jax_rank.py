"""What `jax_pool`, the caller's side, starts: the process of one rank."""

from __future__ import annotations

import faulthandler
import functools
import importlib
import inspect
import os
import shutil
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shardiff.ranks.messages import receive
from shardiff.ranks.notes import ITS_TURN, Describe
from shardiff.ranks.rank import Rank, note_call, report_phase, run
from shardiff.system.network import LOOPBACK
from shardiff.system.processes import when_parent_ends

SECONDARY = ("loo", "onnection", "oordination", "distributed service", "NCCL")  # in errors another rank may have caused


@dataclass(frozen=True)
class Start:
    """What a rank is told first. notes: a file; directory: for temporary files; describe: see `jax_pool.workers`."""

    rank: int
    world_size: int
    port: int
    device: str
    timeout: float
    notes: Path
    directory: str
    describe: Describe | None


def be_rank() -> NoReturn:
    """A rank's process: start jax, then run what the caller sends until it is gone. Standard input is its socket."""
    when_parent_ends(signal.SIGCONT)  # should it be stopped when the caller ends, it goes on, to end itself
    sock = socket.socket(fileno=os.dup(0))
    try:
        start: Start = receive(sock)
    except (EOFError, ConnectionError):
        os._exit(1)
    leave = functools.partial(_leave, start.directory)
    try:
        this = Rank(start.rank, sock, start.notes, waits, leave)
    except FileNotFoundError:  # the caller's files went with it
        leave()
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    sys.stdout = open(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # gloo prints to standard output that its ranks are connected
    faulthandler.enable(all_threads=False)
    run(this, lambda this: _work(this, start), SECONDARY)


def _leave(directory: str) -> NoReturn:
    """The caller is gone: end this process with all that it has started, which is in its process group."""
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _work(this: Rank, start: Start) -> NoReturn:
    """A rank: join the others, then answer calls until the caller ends it."""
    _join(start)
    while True:
        this.report_phase(ITS_TURN)
        function, args = this.next_call()
        this.report_phase("call")
        result = function(*args)
        this.answer(result)
        del function, args, result


def _join(start: Start) -> None:
    """Join the other ranks, with one device."""
    from shardiff.ranks import jax_devices

    with jax_devices.quiet_stderr():
        import jax

        from shardiff.ranks import jax_notes

        with suppress(ImportError, AttributeError):  # gloo listens at the host's name, and jax has no option for it
            lib = importlib.import_module("jax._src.lib")._jax
            lib.make_gloo_tcp_collectives = functools.partial(lib.make_gloo_tcp_collectives, hostname=LOOPBACK)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        here = f"{LOOPBACK}:{start.port}"
        # Longer than the caller's patience, who says more.
        limits = dict.fromkeys(("initialization_timeout", "heartbeat_timeout_seconds"), int(start.timeout) + 300)
        known = inspect.signature(jax.distributed.initialize).parameters
        report_phase("rendezvous")
        jax.distributed.initialize(
            here,
            start.world_size,
            start.rank,
            local_device_ids=[start.rank] if start.device == "cuda" else None,
            cluster_detection_method="deactivate",
            coordinator_bind_address=here,
            **{name: limit for name, limit in limits.items() if name in known},
        )
    jax_devices.prepare(1, start.device)
    report_phase("start-up")
    jax_notes.watch(note_call, report_phase, start.describe)


def waits(stack: str) -> bool:
    """Whether the stack is that of a thread that waits for a program, which waits for other ranks."""
    innermost = [line for line in stack.splitlines() if line.startswith("  File ")][-1:]
    return any("/jax/" in line or "jax_notes.py" in line for line in innermost)
