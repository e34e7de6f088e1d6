"""Processes that a traced program starts: those that are its ranks come by here, others are at least told of.

Processes that multiprocessing spawns, and the server that forks others, run the code that they are given, traced.
Forked ones inherit all of it. What is started by subprocess is traced where it is a rank: the same script again, as
Lightning starts it, or a Python program with a rank of its own in its environment. Any other is another program; where
that is Python, a line says that nobody saw what it sent.
"""

from __future__ import annotations

import multiprocessing.spawn
import multiprocessing.util
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardiff.tracing.settings import START, STARTED, Settings, command, spawn_command
from shardiff.tracing.where import TORCH, where

LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")
RANK = ("RANK", "LOCAL_RANK")  # what tells a process which rank it is
VALUED = ("-W", "-X", "--check-hash-based-pycs")  # options of Python that take the next word
SERVER = "multiprocessing.forkserver"  # in the code of the server that forks processes


def follow(given: Settings) -> None:
    """Trace what this process starts by multiprocessing, and note what it starts otherwise."""
    command_line, start = multiprocessing.spawn.get_command_line, multiprocessing.util.spawnv_passfds
    begin = subprocess.Popen.__init__

    def spawned(*args: Any, **kwargs: Any) -> list[str]:
        return traced(list(command_line(*args, **kwargs)), given)

    def started(path: Any, args: Sequence[Any], fds: Any) -> int:
        served = any(SERVER in os.fsdecode(arg) for arg in args)
        return start(path, traced([os.fsdecode(arg) for arg in args], given) if served else args, fds)

    def popen(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        begin(self, args if rest else rank_command(args, options, given), *rest, **options)

    multiprocessing.spawn.get_command_line = spawned
    multiprocessing.util.spawnv_passfds = started
    subprocess.Popen.__init__ = popen
    sys.addaudithook(lambda event, args: note(event, args, given.directory) if event == "subprocess.Popen" else None)


def traced(command: list[str], given: Settings) -> list[str]:
    """The command of a Python process that runs code, with that code run by us."""
    if "-c" in command:  # it is not in a frozen executable
        code = command.index("-c") + 1
        command[code] = spawn_command(given, command[code])
    return command


def rank_command(args: Any, options: Mapping[str, Any], given: Settings) -> Any:
    """What subprocess is asked to start, or, where that is a rank of this program, the same traced."""
    if isinstance(args, str | bytes | os.PathLike) or options.get("shell") or options.get("executable"):
        return args
    words = [os.fsdecode(word) for word in args]
    environment = options.get("env") or os.environ
    found = program_of(words, options.get("cwd"))
    if found is None:
        return args
    at, kind, target = found
    again = kind == given.kind and kind == "script" and Path(options.get("cwd") or "", target).resolve() == given.script
    again = again or kind == given.kind == "module" and target == given.target
    other = any(environment.get(name, "") not in ("", os.environ.get(name)) for name in RANK)
    if not (again or other or target in LAUNCHERS) or TORCH in target:
        return args
    rank = replace(given, kind=kind, target=target, arguments=tuple(words[at:]), fd=-1, followed=True)
    return [*words[: at - (2 if kind == "module" else 1)], "-c", command(rank)]


def program_of(words: Sequence[str], cwd: Any = None) -> tuple[int, str, str] | None:
    """Where the arguments of a Python program begin in a command, its kind and its name; None for any other command."""
    if not words or not Path(words[0]).name.startswith("python"):
        return None
    at = 1
    while at < len(words):
        word = words[at]
        if word == "-m" and at + 1 < len(words):
            return at + 2, "module", words[at + 1]
        if word.startswith("-"):
            if word in ("-", "-c"):
                return None
            at += 2 if word in VALUED else 1
            continue
        return (at + 1, "script", word) if Path(os.fsdecode(cwd or ""), word).is_file() else None
    return None


def note(event: str, args: tuple[Any, ...], directory: str) -> None:
    """Write down that Python was started by subprocess, and where, unless by torch for itself."""
    with suppress(Exception):
        command = [args[1]] if isinstance(args[1], str | bytes) else list(args[1])
        words = [os.fsdecode(word) for word in command]
        program = " ".join(shlex.quote(word) for word in words[1:])
        if not Path(words[0]).name.startswith("python") or TORCH in program or not words[1:]:
            return
        if any(word.startswith(START) for word in words):  # it is traced
            return
        shown = program if len(program) <= 80 else f"{program[:77]}..."
        line = f"{where().source or 'the program'} has started Python by subprocess: {shown}"
        with open(Path(directory, f"{os.getpid()}{STARTED}"), "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
