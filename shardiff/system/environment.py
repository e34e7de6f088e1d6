"""Environment variables that would make a command fail halfway are refused before anything starts."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile

from shardiff.system.extras import require
from shardiff.system.inputs import one_line

LONGEST = 60  # characters of the temporary directory's path: the address of a socket in it has at most 107
READ_BY_JAX = ("XLA_FLAGS", "JAX_")


def check(jax: bool = False) -> None:
    """Raises ValueError, in one line, if a variable is wrong. jax: whether jax is needed, and reads the environment."""
    if jax:
        require("this", "jax")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads and not (threads.isascii() and threads.isdigit() and 1 <= int(threads[:9]) and len(threads) < 7):
        raise ValueError(f"OMP_NUM_THREADS must be a number of threads, got {one_line(threads)[:60]!r}")
    try:
        directory = tempfile.gettempdir()
    except OSError as error:
        raise ValueError(f"{error.strerror}; set TMPDIR to a directory that can be written") from None
    if len(directory) > LONGEST:
        raise ValueError(f"TMPDIR may have at most {LONGEST} characters, got {len(directory)}: {directory[:60]}...")
    given = tuple((key, value) for key, value in sorted(os.environ.items()) if key.startswith(READ_BY_JAX))
    if jax and given and (flaw := jax_flaw(given)):
        raise ValueError(f"jax cannot start with {', '.join(key for key, _ in given)} as set: {flaw}")


@functools.cache
def jax_flaw(given: tuple[tuple[str, str], ...]) -> str | None:
    """Why jax cannot start in such an environment, in one line; None if it can. XLA may abort, so a process tries."""
    command = [sys.executable, "-P", "-c", "import jax; jax.devices('cpu')"]  # -P: whatever the current directory holds
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"it ends with status {done.returncode}"]
    told = next((line.partition("] ")[2] for line in lines if line.startswith("F") and "] " in line), lines[-1])
    return one_line(told)[:300]
