"""`shardiff trace` runs any script as it is, and shows what its ranks send however the script ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardiff.record import OPS, Record, totals
from shared_tests.tool.scripts_to_trace import DDP, DISAGREES, FAILS, HANGS, SPAWNS, THINKS, TRAINS

Finished = dict[str, subprocess.CompletedProcess[str]]
TRACE = [sys.executable, "bin/shardiff", "trace"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *TRACE[1:]]
# Those that are expected to be sound are verified too: it must find nothing, and change nothing.
COMMANDS = {
    "trains": ([*TRACE, "--nproc", "2", "--json", "train.py", "--steps", "3"], TRAINS),
    "fails": ([*TRACE, "--nproc", "2", "--json", "train.py"], FAILS),
    "ddp": ([*TRACE, "--nproc", "2", "--values", "--json", "-m", "train"], DDP),
    "spawns": ([*TRACE, "--verify", "--json", "train.py"], SPAWNS),
    "disagrees": ([*TRACE, "--verify", "--json", "train.py"], DISAGREES),
    "thinks": ([*TRACE, "--verify", "--timeout", "2", "train.py"], THINKS),
}


def start(command: list[str], text: str, directory: Path) -> subprocess.Popen[str]:
    """Start a command in a directory with this script train.py, and modules whose names are ours too."""
    directory.joinpath("train.py").write_text(text)
    directory.joinpath("contract.py").write_text("size = 4\n")
    for name in ("record.py", "shardiff.py", "shardiff_helpers.py", "benchmarks/__init__.py", "benchmarks/speed.py"):
        directory.joinpath(name).parent.mkdir(exist_ok=True)
        directory.joinpath(name).touch()
    directory.joinpath("bin").mkdir()
    directory.joinpath("bin/shardiff").write_text("from shardiff.cli.main import main\nraise SystemExit(main())\n")
    directory.joinpath("tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(directory / "tmp")}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=directory, env=environment, stdout=pipe, stderr=pipe, text=True)


def alone(command: list[str], text: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Start a command and wait for its end."""
    process = start(command, text, directory)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """All commands, run at the same time, as users may run several."""
    directories = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in COMMANDS}
    started = {name: start(*given, directories[name]) for name, given in COMMANDS.items()}
    ended = {}
    for name, process in started.items():
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.terminate()  # which shows what was traced so far
            out, err = process.communicate()
        ended[name] = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    return ended


@pytest.mark.parametrize("name", COMMANDS)
def test_no_process_or_file_is_left(name: str, finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.getbasetemp() / f"{name.replace(' ', '_')}0"
    assert directory.joinpath("train.py").exists() and not list(directory.glob("tmp/shardiff-*"))
    here = [process.info for process in psutil.process_iter(["pid", "cwd", "cmdline"])]
    assert not [info for info in here if info["cwd"] == str(directory)]


def line(text: str) -> str:
    """The place of this text in TRAINS."""
    return f"train.py:{TRAINS[: TRAINS.index(text)].count(chr(10)) + 1}"


def trains(document: dict[str, Any]) -> None:
    """Check the JSON of what TRAINS sends."""
    assert (document["program"], document["ranks"]) == ("train.py --steps 3", 2)
    assert document["disagreements"] == []
    records = [Record.from_json(fields) for fields in document["records"]]
    assert [(r.op, r.payload_bytes, r.executions.max, r.phase, r.source, r.groups, r.edges) for r in records] == [
        ("all_reduce", 16, 3, "backward", line("dist.all_reduce(w.grad)"), ((0, 1),), None),
        ("collective_permute", 8, 1, "backward", line("dist.send("), None, ((0, 1),)),
    ]
    assert all(r.op in OPS for r in records) and [r.reduction for r in records] == ["sum", None]
    assert document["totals"] == totals(records)


def test_a_script_for_torchrun_runs_as_it_is(finished: Finished) -> None:
    done = finished["trains"]
    assert done.returncode == 0, done.stderr
    trains(json.loads(done.stdout))
    for said in ("trained [0.0, 0.0]", "freed at the end", '  warnings.warn("a warning of the script")'):
        assert done.stderr.splitlines().count(said) == 2, said


@pytest.mark.long
def test_under_torchrun_its_processes_are_traced(tmp_path: Path) -> None:
    done = alone([*TORCHRUN, "--verify", "--json", "train.py", "--steps", "3"], TRAINS, tmp_path)
    assert done.returncode == 0, done.stderr
    trains(json.loads(done.stdout))


def test_a_script_that_fails_keeps_its_status_and_what_it_sent(finished: Finished) -> None:
    done = finished["fails"]
    assert done.returncode in (1, 7), "whichever rank was first"
    assert f"the script ended with status {done.returncode} on rank " in done.stderr
    assert "RuntimeError: late" in done.stderr and "shardiff/" not in done.stderr, "the script's own frames only"
    document = json.loads(done.stdout)
    assert [(fields["op"], fields["source"]) for fields in document["records"]] == [("all_reduce", "train.py:5")]
    assert document["disagreements"] == [
        "group 0 (ranks 0, 1), call 3: rank 0: all_reduce(sum) float32 16 B [4] at train.py:9; "
        "rank 1: no such call (its last: barrier at train.py:6)"
    ]


def test_ddp_ends_and_its_buckets_set_up_and_parted_replicas_are_told(finished: Finished) -> None:
    done = finished["ddp"]
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert list(document["segments"]) == ["set-up", "step 1", "step 2"]
    assert {f["phase"] for f in document["segments"]["set-up"]["records"]} == {"other"}
    [bucket] = document["segments"]["step 1"]["records"]
    told = bucket["op"], bucket["payload_bytes"], bucket["detail"], bucket["moves"]
    assert told == ("all_reduce", 40, "gradients of bias, weight", "gradient")
    [parted] = document["disagreements"]
    assert parted.startswith("the parameter weight differs between replicas after step 1: rank 0: ")


def test_processes_that_a_script_starts_are_traced(finished: Finished) -> None:
    done = finished["spawns"]
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ranks"] == 2
    assert [(f["op"], f["groups"], f["source"]) for f in document["records"]] == [
        ("all_reduce", [[0, 1]], "train.py:6")
    ]
    assert document["notes"] == [
        "train.py:15 has started Python by subprocess: -c pass; what it sent is not in here. To trace ranks, have "
        "shardiff start them: shardiff trace --nproc N SCRIPT"
    ]


def test_a_call_that_does_not_fit_is_stopped_and_named_in_the_same_json(finished: Finished) -> None:
    done = finished["disagrees"]
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert [(f["op"], f["source"]) for f in document["records"]] == [("broadcast", "train.py:6")]
    assert document["disagreements"] == [
        "group 0 (ranks 0, 1), call 2: rank 0: all_reduce(sum) float32 16 B [4] at train.py:8; "
        "rank 1: all_reduce(max) float32 16 B [4] at train.py:10"
    ]
    assert "went on" not in done.stderr


def test_a_rank_that_does_not_come_is_named_with_its_stack(finished: Finished) -> None:
    done = finished["thinks"]
    assert done.returncode == 3, done.stderr
    assert (
        "stuck for 2 s: rank 0 waits in group 0 (ranks 0, 1), call 2: all_reduce(sum) float32 16 B [4] at train.py:11; "
        "rank 1 does not come (its last: barrier at train.py:8)" in done.stdout
    )
    assert done.stderr.count("is at:") == 1, "of those that others wait for"
    assert 'train.py", line 5 in think' in done.stderr and "line 10 in rank_main" in done.stderr


@pytest.mark.long
def test_without_verify_silence_is_reported_with_all_stacks(tmp_path: Path) -> None:
    done = alone([*TRACE, "--timeout", "2", "train.py"], THINKS, tmp_path)
    assert done.returncode == 3, done.stderr
    assert (
        "stuck: no call of any rank for 2 s; rank 0 (its last: all_reduce(sum) float32 16 B [4] at train.py:11); "
        "rank 1 (its last: barrier at train.py:8)" in done.stdout
    )
    assert 'train.py", line 5 in think' in done.stderr and 'train.py", line 11 in rank_main' in done.stderr


def test_a_script_that_hangs_shows_what_it_waits_for_when_interrupted(tmp_path: Path) -> None:
    started = start([*TRACE, "--nproc", "2", "train.py"], HANGS, tmp_path)
    with started:
        assert started.stderr is not None
        pid = next(int(line.split()[1]) for line in started.stderr if line.startswith("hangs"))
        started.send_signal(signal.SIGINT)
        shown, _ = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "rank 0: all_reduce(sum) float32 16 B [4] at train.py:8; rank 1: no such call (its last: none)" in shown
    assert not psutil.pid_exists(pid)
