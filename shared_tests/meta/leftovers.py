"""A pytest plugin: the session fails if it leaves anything behind, and says what.

Every process that a session starts, directly or indirectly, inherits from its environment a mark and a directory for
temporary files of this session alone. After the session no process with the mark may be alive, nothing named shardiff-*
may be in the directory (libraries do leave logs there), and /dev/shm may have no new entry that no process uses. A
listening port belongs to a process, so the first check covers it; pytest itself, which remains, must not listen either.
Other sessions that run at the same time are ignored.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

MARK = "SHARDIFF_SUITE"  # a path: a session started by a test of another has that one's mark in front of its own
PATIENCE = 10  # seconds for what ends by itself once its parent has gone
SHM = Path("/dev/shm")


class Leftovers:
    """The check of one session, made by its first process."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.mark = f"{os.environ.get(MARK, '')}/{os.getpid()}-{time.time_ns()}"
        self.shared = shm()
        self.before = {name: os.environ.get(name) for name in (MARK, "TMPDIR", "PYTEST_DEBUG_TEMPROOT")}
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps what tests wrote
        remove_abandoned(Path(tempfile.gettempdir()))
        self.directory = Path(tempfile.mkdtemp(prefix=f"shardiff-suite-{os.getpid()}-"))
        self.outside, tempfile.tempdir = tempfile.tempdir, None
        os.environ.update({MARK: self.mark, "TMPDIR": str(self.directory)})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Runs after the fixtures have ended their processes and xdist its workers."""
        end = time.monotonic() + PATIENCE
        while (found := self.look()) and time.monotonic() < end:
            time.sleep(0.1)
        self.found = found
        shutil.rmtree(self.directory, ignore_errors=True)
        tempfile.tempdir = self.outside
        for name, value in self.before.items():
            os.environ.pop(name)
            os.environ.update({name: value} if value is not None else {})
        if self.found:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.found:
            terminalreporter.section("left behind by the suite", red=True)
            terminalreporter.write("".join(f"{line}\n" for line in self.found))

    def look(self) -> list[str]:
        """A line for each thing that should not be there."""
        lines = [f"process {process.pid}: {command(process)}" for process in marked(self.mark)]
        lines += [f"temporary file {path}" for path in sorted(self.directory.glob("shardiff-*"))]
        lines += [f"shared memory {path}" for path in sorted(unused(shm() - self.shared))]
        return lines + [f"listening at {address}" for address in listening()]


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # those of xdist belong to the session that started them
        config.pluginmanager.register(Leftovers(), "leftovers of this session")


def remove_abandoned(temporary: Path) -> None:
    """Remove the directories of sessions that were killed."""
    for path in temporary.glob("shardiff-suite-*-*"):
        if not psutil.pid_exists(int(path.name.split("-")[2])):
            shutil.rmtree(path, ignore_errors=True)


def marked(mark: str) -> Iterator[psutil.Process]:
    """Living processes other than this one that have the mark, which those that they forked have too."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK, "").startswith(mark):
                yield process


def command(process: psutil.Process) -> str:
    """What the process runs, in one line; its name if it has ended."""
    with suppress(psutil.Error):
        return " ".join(" ".join(process.cmdline()).split())[:200] or process.name()
    return "(gone)"


def shm() -> set[Path]:
    """The entries of /dev/shm, if it exists."""
    return set(SHM.iterdir()) if SHM.is_dir() else set()


def unused(paths: set[Path]) -> set[Path]:
    """The entries that no process has open or mapped."""
    if not paths:
        return set()
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            used |= {line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()}
            used |= {os.readlink(entry) for entry in (process / "fd").iterdir()}
    return {path for path in paths if str(path) not in used}


def listening() -> list[str]:
    """The addresses on which this process listens."""
    connections = psutil.Process().net_connections("inet")
    return [f"{c.laddr.ip}:{c.laddr.port}" for c in connections if c.status == psutil.CONN_LISTEN]
