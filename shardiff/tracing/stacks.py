"""Where a process is, asked by a signal: it answers, whatever it does, unless it is stopped. Needs no torch."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SIGNAL = signal.SIGUSR2
NOT_THE_PROGRAM = (str(Path(__file__).parent), "<frozen runpy>", "<string>")


def answer(directory: str) -> str:
    """Have this process answer in a file of its own in `directory`. Returns the file's path."""
    path = str(Path(directory, f"{os.getpid()}.stack"))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)  # open to the end of the process
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    return path


def ask(files: Iterable[str], patience: float = 2.0) -> dict[int, str]:
    """The stacks by process of those whose files these are, innermost call first; where none came, a word on why."""
    stacks: dict[int, str] = {}
    for path in map(Path, files):
        pid = int(path.stem)
        with suppress(OSError):
            before = path.stat().st_size
            os.kill(pid, SIGNAL)
            deadline = time.monotonic() + patience
            while path.stat().st_size == before and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.05)  # for the rest of it
            lines = path.read_text()[before:].splitlines()
            shown = [line for line in lines if not any(name in line for name in NOT_THE_PROGRAM)]
            stacks[pid] = "\n".join(shown) or "  it does not answer: it may be stopped"
    return stacks
