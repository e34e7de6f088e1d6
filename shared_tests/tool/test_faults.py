"""Some of the faults of `shared_tests.tool.injections`, each in a command as a user runs it; and commands at once.

Raising, dying and getting stuck are tried phase by phase in test_launch.py, without a command around them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.report import run as report_run
from contract.axes import STRATEGIES
from shardiff.cli import main as cli
from shared_tests.evidence import often
from shared_tests.tool.injections import (
    COMMANDS,
    COMPILED,
    RANK_FAULTS,
    STATUS,
    TRAINING,
    Injection,
    inject,
    injections,
    judge,
)

SOME = [
    Injection("check", "torch", "data_parallel", "rank", "SIGKILL", "update", 1),
    Injection("check", "jax", "data_parallel", "process", "sleep", "parameters"),
    Injection("diff", "torch", "pipeline_parallel", "rank", "raise", "backward", 1),
    Injection("bench collectives", "torch", "", "rank", "exit 0", "all_reduce", 0),
    Injection("bench collectives", "torch", "", "rank", "memory", "all_reduce", 1),
    Injection("bench collectives", "torch", "", "starter", "SIGSTOP", "call"),
    Injection("bench collectives", "torch", "", "command", "SIGHUP", "rendezvous", 1),
    Injection("bench collectives", "jax", "", "rank", "SIGSTOP", "rendezvous", 1),
    Injection("bench collectives", "jax", "", "command", "SIGKILL", "run", 0),
    Injection("bench collectives", "jax", "", "rank", "raise", "compile", 1),
    Injection("bench bubbles", "torch", "", "rank", "sleep", "backward", 1),
]


OFTEN = [SOME[i] for i in (0, 1, 5, 7)]  # that is, in `make test`


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize(
    "injection",
    often(SOME, OFTEN),
    ids=lambda one: f"{one.command}, {one.framework}: {one}",
)
def test_a_command_says_what_failed_and_leaves_nothing(injection: Injection) -> None:
    outcome = inject(injection)
    assert outcome.wrong == (), outcome.said


def test_fifty_injections_cover_commands_kinds_and_strategies() -> None:
    made = injections(50, 0)
    assert made == injections(50, 0) != injections(50, 1)
    assert len(set(made)) == 50
    assert {(one.command, one.framework) for one in made} == {*COMMANDS, ("check", "jax")}
    assert {one.how for one in made if one.target == "rank"} == set(RANK_FAULTS)
    assert {one.how for one in made if one.target == "command"} == set(STATUS)
    assert {one.target for one in made} == {"rank", "starter", "process", "command"}
    assert len({one.strategy for one in made}) == len(STRATEGIES)
    assert {one.phase for one in made} >= {*TRAINING, *COMPILED}


SAID = """rank 1 of 2 raised in phase forward:

Traceback (most recent call last):
ValueError: the planted error

rank 0 of 2, in phase forward, failed to communicate
"""
WRONG = {
    "another rank first": SAID.replace("rank 1 of 2 raised", "rank 0 of 2 raised"),
    "another phase": SAID.replace("raised in phase forward", "raised in phase backward"),
    "another kind": SAID.replace("raised in", "died in"),
    "another's traceback first": SAID.replace("ValueError: the planted error", "RuntimeError: lost"),
}


def test_the_judge_finds_what_is_wrong() -> None:
    one = Injection("check", "torch", "data_parallel", "rank", "raise", "forward", 1)
    assert list(judge(one, 3, SAID, 1.0, [])) == []
    for why, said in WRONG.items():
        assert list(judge(one, 3, said, 1.0, [])), why
    assert list(judge(one, 1, SAID, 1.0, [])) == ["status 1, not 3"]
    assert list(judge(one, 3, SAID, 31.0, [])) == ["it took 31 s"]
    assert list(judge(one, 3, SAID, 1.0, ["process sleep is left"])) == ["process sleep is left"]
    assert list(judge(one, 3, SAID, None, [])) == ["the fault did not happen"]


@pytest.mark.parametrize("line", ["check", "diff tensor_parallel", "bench collectives", "bench steps", "report"])
def test_a_timeout_that_cannot_be_waited_for_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    for seconds in ("0", "-1", "nan", "inf"):
        assert cli.main([*line.split(), "--timeout", seconds]) == 2
        assert f"above 0, got {float(seconds)}" in capsys.readouterr().err


def test_a_report_passes_its_timeout_on() -> None:
    assert report_run.command("bubbles", True, 7).endswith(" --timeout 7")
    assert report_run.command("diff", True, 0.5).startswith("diff data_parallel ")
    assert " --timeout 0.5 --layers 4 --target " in report_run.command("diff", True, 0.5)
    assert "timeout" not in report_run.command("check", True)


def test_a_report_ends_a_command_that_is_stopped(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(report_run, "STOPPED", 0)
    with subprocess.Popen(["sleep", "3600"], stdout=subprocess.PIPE, text=True) as process:
        process.send_signal(signal.SIGSTOP)
        assert report_run.wait(process) == ""
    assert process.returncode == -signal.SIGKILL
    assert capfd.readouterr().err == "shardiff: the command was stopped and did not continue, so it is ended\n"


ALONE = """
import fcntl, os, socket, struct, sys
socket.sethostname("no-such-host.invalid")
with socket.socket() as s:  # lo up, by SIOCSIFFLAGS
    fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", 1))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def alone() -> list[str]:
    """What runs Python, where possible with no network but loopback, on a host whose name does not resolve."""
    unshare = ["unshare", "--map-root-user", "--uts", "--net"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return [sys.executable]
    return [*unshare, sys.executable, "-c", ALONE]


def test_commands_at_once_with_a_busy_port_and_without_a_network() -> None:
    """Of both frameworks; only torch would take the port. A check starts its ranks as this benchmark does."""
    sizes = ["--ranks", "2", "--size", "4KiB", "--iterations", "2"]
    command = ["-m", "shardiff", "bench", "collectives", "--op", "all_reduce", *sizes, "--json"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        in_torch = [sys.executable, *command, "--implementation", "torch"]
        runs = [
            (subprocess.Popen(in_torch, env=busy, **pipes), {"torch"}),
            (subprocess.Popen([*alone(), *command], env=busy, **pipes), {"torch", "jax"}),
        ]
        for process, frameworks in runs:
            out, err = process.communicate(timeout=180)
            assert process.returncode == 0, err
            rows = json.loads(out)["rows"]
            assert {row["implementation"] for row in rows if row["correct"]} == frameworks
