"""For commands: a directory with every kind of file, and runs without any error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import check
from shardiff.system import inputs


@pytest.fixture
def ideal_runs(monkeypatch):
    """Replace every run of a check by one without any error; returns the list of those asked for."""
    from shared_tests.proof.test_proof import ideal

    asked = []

    def execute(run):
        asked.append(run)
        return ideal(run)

    monkeypatch.setattr(check, "executor", lambda runs, timeout, stack: execute)
    return asked


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A current directory with every kind of file that a path can lead to. Nobody waits for pipes for long."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inputs, "PATIENCE", 0.01)
    monkeypatch.setattr(inputs.read_bytes, "__defaults__", (0.01,))
    os.mkfifo("fifo")
    os.symlink("loop", "loop")
    Path("binary").write_bytes(bytes(range(256)))
    Path("text.json").write_text("{}")
    Path("script.py").write_text("")
    return tmp_path
