"""Processes that a traced program starts: those of multiprocessing come by here, others are at least told of.

Spawned processes, and the server that forks others, run the code that multiprocessing gives them, traced. Forked ones
inherit all of it. What is started by subprocess is another program; where that is Python, a line says that nobody saw
what it sent.
"""

from __future__ import annotations

import multiprocessing.spawn
import multiprocessing.util
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardiff.tracing.settings import STARTED, Settings, spawn_command
from shardiff.tracing.where import TORCH, where

SERVER = "multiprocessing.forkserver"  # in the code of the server that forks processes


def follow(given: Settings) -> None:
    """Trace what this process starts by multiprocessing, and note what it starts otherwise."""
    command_line, start = multiprocessing.spawn.get_command_line, multiprocessing.util.spawnv_passfds

    def spawned(*args: Any, **kwargs: Any) -> list[str]:
        return traced(list(command_line(*args, **kwargs)), given)

    def started(path: Any, args: Sequence[Any], fds: Any) -> int:
        served = any(SERVER in os.fsdecode(arg) for arg in args)
        return start(path, traced([os.fsdecode(arg) for arg in args], given) if served else args, fds)

    multiprocessing.spawn.get_command_line = spawned
    multiprocessing.util.spawnv_passfds = started
    sys.addaudithook(lambda event, args: note(event, args, given.directory) if event == "subprocess.Popen" else None)


def traced(command: list[str], given: Settings) -> list[str]:
    """The command of a Python process that runs code, with that code run by us."""
    if "-c" in command:  # it is not in a frozen executable
        code = command.index("-c") + 1
        command[code] = spawn_command(given, command[code])
    return command


def note(event: str, args: tuple[Any, ...], directory: str) -> None:
    """Write down that Python was started by subprocess, and where, unless by torch for itself."""
    with suppress(Exception):
        command = [args[1]] if isinstance(args[1], str | bytes) else list(args[1])
        words = [os.fsdecode(word) for word in command]
        program = " ".join(shlex.quote(word) for word in words[1:])
        if not Path(words[0]).name.startswith("python") or TORCH in program or not words[1:]:
            return
        shown = program if len(program) <= 80 else f"{program[:77]}..."
        line = f"{where().source or 'the program'} has started Python by subprocess: {shown}"
        with open(Path(directory, f"{os.getpid()}{STARTED}"), "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
