"""One process of a program that is traced: runs a script as `python script.py` would, and notes every call.

Each call is noted before it runs, so that nothing is lost when a process is killed or never returns: as a line of this
process's own file, or, if calls are to be verified, with the verifier. What the process starts by multiprocessing is
traced too: spawned processes come by here, forked ones inherit all of it.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing.spawn
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch.distributed import Store, TCPStore

from shardiff.system.network import LOOPBACK
from shardiff.system.processes import when_parent_ends
from shardiff.tracing.calls import Call
from shardiff.tracing.link import Link, StoppedError
from shardiff.tracing.stacks import answer
from shardiff.tracing.tracer import capture

PATIENCE = 10.0  # seconds in which to be ended
ROOT = str(Path(__file__).parents[2])  # what starts a process puts it first on sys.path, to find this module


def main() -> None:
    """Arguments: a directory for files; the verifier's address or ""; a listening socket for the store, or -1; a script
    and its arguments."""
    directory, verifier, listening, script, *arguments = sys.argv[1:]
    store = None
    if int(listening) >= 0:  # under torchrun the store is torchrun's; here rank 0 has it, until it ends
        port = int(os.environ["MASTER_PORT"])
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=int(listening))
    prepare(directory, verifier, os.environ.get("MASTER_PORT", ""))
    sys.argv[:] = [script, *arguments]
    sys.path[:] = [str(Path(script).resolve().parent), *(path for path in sys.path if path)]
    try:
        with noted(directory, verifier, int(os.environ.get("RANK", 0))):
            runpy.run_path(script, run_name="__main__")
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != script:
            frames = frames.tb_next  # from the script's own frame on
        frames = frames or error.__traceback__
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.exit(1)
    del store


def spawned(directory: str, verifier: str, port: str, code: str) -> None:
    """Run the code that multiprocessing starts a spawned process with."""
    prepare(directory, verifier, port)
    with noted(directory, verifier, None):
        exec(code, {})


def prepare(directory: str, verifier: str, port: str) -> None:
    """End with the process that started this one, have spawned ones come by here, and find the store."""
    when_parent_ends(signal.SIGKILL)
    sys.path.remove(ROOT)
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    command_line, create_store = multiprocessing.spawn.get_command_line, rendezvous._create_c10d_store

    def with_us(*args: Any, **kwargs: Any) -> list[str]:
        command = list(command_line(*args, **kwargs))
        if "-c" in command:  # it is not in a frozen executable
            code = command.index("-c") + 1
            start = f"import sys; sys.path.insert(0, {ROOT!r}); from {__name__} import spawned"
            command[code] = f"{start}; spawned({directory!r}, {verifier!r}, {port!r}, {command[code]!r})"
        return command

    def store_at(host: str, at: Any, *args: Any, **kwargs: Any) -> Store:
        """torch's, but where a script has chosen another port no one has made a store yet."""
        asked = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
        if asked and str(at) != port:
            del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        try:
            return create_store(host, at, *args, **kwargs)
        finally:
            if asked:
                os.environ["TORCHELASTIC_USE_AGENT_STORE"] = asked

    multiprocessing.spawn.get_command_line = with_us
    rendezvous._create_c10d_store = store_at


@contextmanager
def noted(directory: str, verifier: str, rank: int | None) -> Iterator[None]:
    """Note or verify every call. rank: as which the process was started, if as one."""
    if not verifier:
        with capture(tell=writer(directory)):
            yield
        return
    link, well = Link(verifier, directory, rank), False
    try:
        with capture(tell=or_end(link.tell), hold=or_end(link.hold)):
            yield
        well = True
    except SystemExit as end:
        well = end.code in (None, 0)
        raise
    finally:
        link.end(well)


def or_end(do: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same, but where the program must not go on it waits to be ended: an error here would hide the verifier's."""

    def done(what: Any) -> None:
        try:
            do(what)
        except StoppedError:
            time.sleep(PATIENCE)
            os._exit(1)

    return done


def writer(directory: str) -> Callable[[Call], None]:
    """A function that appends a call to this process's file."""
    files: dict[int, IO[str]] = {}

    def write(call: Call) -> None:
        pid = os.getpid()
        if pid not in files:
            answer(directory)
            files[pid] = open(Path(directory, f"{pid}.jsonl"), "w", buffering=1)
        files[pid].write(json.dumps(call.to_json()) + "\n")

    answer(directory)
    return write
