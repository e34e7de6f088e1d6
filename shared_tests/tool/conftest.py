"""For commands with bad input: a directory with every kind of file, and commands that measure nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import commands
from benchmarks import diff as diff_command
from benchmarks.bubbles import command as bubbles_command
from benchmarks.collectives import command as collectives_command
from benchmarks.report import command as report_command
from benchmarks.steps import command as steps_command
from shardiff.cli import trace as trace_script
from shardiff.system import inputs


@pytest.fixture(scope="module")
def nothing_starts():
    """Replaces everything after validation by a function that prints a word and returns status 0."""

    def started(*_, **__):
        print("started")
        return 0

    with pytest.MonkeyPatch.context() as patch:
        for module in (collectives_command, steps_command, bubbles_command, report_command):
            patch.setattr(module, "answer", started)
        patch.setattr(commands, "answer_check", started)
        patch.setattr(diff_command, "answer_diff", started)
        patch.setattr(trace_script, "show", started)
        yield


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
