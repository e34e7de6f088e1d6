"""A session that leaves something behind fails, and says what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shared_tests.meta.leftovers import SHM

ROOT = Path(__file__).parents[2]
PLANTS = """
import socket, subprocess, sys, tempfile
from pathlib import Path
ORPHAN = "import time; print('up', flush=True); time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {ORPHAN!r}], start_new_session=True); 1 / 0"
def test_plants():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout.readline() == b"up\\n" and parent.wait() == 1
    parent.stdout.close()
    Path(tempfile.mkdtemp(prefix="shardiff-"), "x").touch()
    Path("/dev/shm/SHM").touch()
    test_plants.kept = socket.create_server(("127.0.0.1", 0))
"""


def session(directory: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the plugin on one file of tests, as a suite of its own."""
    directory.joinpath("test_it.py").write_text(text)
    directory.joinpath("conftest.py").write_text("from shared_tests.meta import leftovers\nleftovers.PATIENCE = 0.1\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "shared_tests.meta.leftovers", "-p", "no:cacheprovider", "."]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "-p no:xdist"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60)


def test_a_session_that_leaves_nothing_passes(tmp_path: Path) -> None:
    done = session(tmp_path, "import tempfile\ndef test_it():\n    tempfile.TemporaryFile().close()\n")
    assert (done.returncode, "left behind" in done.stdout) == (0, False), done.stdout


@pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm")
def test_what_is_left_is_named_and_fails_the_session(tmp_path: Path) -> None:
    name = f"shardiff-{os.getpid()}"
    try:
        done = session(tmp_path, PLANTS.replace("SHM", name))
    finally:
        (SHM / name).unlink(missing_ok=True)
    lines = done.stdout.splitlines()
    found = [line for line in lines if line.startswith("process ")]
    for line in found:
        psutil.Process(int(line.split()[1].rstrip(":"))).kill()
    assert done.returncode == 1 and "1 passed" in lines[-1], done.stdout
    assert len(found) == 1 and "time.sleep(600)" in found[0], done.stdout
    assert sum(line.startswith("temporary file ") and "/shardiff-" in line for line in lines) == 1, done.stdout
    assert f"shared memory /dev/shm/{name}" in lines
    assert sum(line.startswith("listening at 127.0.0.1:") for line in lines) == 1, done.stdout
