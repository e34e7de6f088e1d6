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

from shardiff.cli import main as cli
from shardiff.diff.record_view import members
from shardiff.record import OPS, Record, record, totals
from shardiff.tracing import traced
from shardiff.tracing.calls import Call
from shardiff.tracing.script import Launch, Watch, environment
from shardiff.tracing.traced import read

TRAINS = """
import os, pickle, sys, warnings
import torch, torch.distributed as dist
import contract, record, shardiff, shardiff_helpers  # its own, all of them
from benchmarks import speed
from contract import size
assert [m.__file__ for m in (contract, record, shardiff, shardiff_helpers, speed)] == [
    os.path.join(sys.path[0], name)
    for name in ("contract.py", "record.py", "shardiff.py", "shardiff_helpers.py", "benchmarks/speed.py")
]
assert sys.path[0] == os.path.dirname(__file__) == os.getcwd(), sys.path
assert not any(name.startswith("shardiff.") for name in sys.modules)
class Kept:
    def __del__(self, write=os.write):
        if vars(self):
            write(2, b"freed at the end\\n")
kept = Kept()  # lives as long as the interpreter
assert type(pickle.loads(pickle.dumps(kept))) is Kept
kept.last = True
warnings.warn("a warning of the script")
assert __name__ == "__main__" and sys.argv[1:] == ["--steps", "3"], sys.argv
dist.init_process_group("gloo")
rank = dist.get_rank()
assert (rank, dist.get_world_size()) == (int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
w = torch.ones(size, requires_grad=True)
for step in range(3):
    loss = (w * rank).sum()
    loss.backward()
    dist.all_reduce(w.grad)
x = torch.full((2,), float(rank))
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
print("trained", x.tolist())
dist.destroy_process_group()
"""
FAILS = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
dist.barrier()
if dist.get_rank() == 1:
    sys.exit(7)
work = dist.all_reduce(torch.ones(4), async_op=True)
raise RuntimeError("late")
"""
SPAWNS = """
import os
import torch, torch.distributed as dist, torch.multiprocessing as mp
def rank_main(rank):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{os.environ['OTHER_PORT']}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
if __name__ == "__main__":
    import socket
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ["OTHER_PORT"] = str(server.getsockname()[1])
    mp.spawn(rank_main, nprocs=2)
"""
HANGS = """
import os, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(600)
threading.Timer(1, lambda: print("hangs", os.getpid(), file=sys.stderr, flush=True)).start()
dist.all_reduce(torch.ones(4))
"""
DISAGREES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.broadcast(torch.ones(4), 0)
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(4))
else:
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)
print("went on")
"""
THINKS = """
import os, socket, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
def think():
    time.sleep(600)
def rank_main(rank, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        think()
    dist.all_reduce(torch.ones(4))
with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
mp.start_processes(rank_main, (port,), nprocs=2, start_method="fork")
"""

DDP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1 * (1 + dist.get_rank()))  # the replicas part
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
main()
"""

Finished = dict[str, subprocess.CompletedProcess[str]]
TRACE = [sys.executable, "bin/shardiff", "trace"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *TRACE[1:]]
# Those that are expected to be sound are verified too: it must find nothing, and change nothing.
COMMANDS = {
    "trains": ([*TRACE, "--nproc", "2", "--json", "train.py", "--steps", "3"], TRAINS),
    "torchrun": ([*TORCHRUN, "--verify", "--json", "train.py", "--steps", "3"], TRAINS),
    "fails": ([*TRACE, "--nproc", "2", "--json", "train.py"], FAILS),
    "ddp": ([*TRACE, "--nproc", "2", "--values", "--json", "-m", "train"], DDP),
    "spawns": ([*TRACE, "--verify", "--json", "train.py"], SPAWNS),
    "disagrees": ([*TRACE, "--nproc", "2", "--verify", "--json", "train.py"], DISAGREES),
    "thinks": ([*TRACE, "--verify", "--timeout", "2", "train.py"], THINKS),
    "is silent": ([*TRACE, "--timeout", "2", "train.py"], THINKS),
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
    """Where it stands in TRAINS."""
    return f"train.py:{TRAINS[: TRAINS.index(text)].count(chr(10)) + 1}"


def trains(document: dict[str, Any]) -> None:
    """What TRAINS sends, as JSON has it."""
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


def test_under_torchrun_its_processes_are_traced(finished: Finished) -> None:
    done = finished["torchrun"]
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


def test_a_call_that_does_not_fit_is_stopped_and_named_in_the_same_json(finished: Finished) -> None:
    done = finished["disagrees"]
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert [(f["op"], f["source"]) for f in document["records"]] == [("broadcast", "train.py:4")]
    assert document["disagreements"] == [
        "group 0 (ranks 0, 1), call 2: rank 0: all_reduce(sum) float32 16 B [4] at train.py:6; "
        "rank 1: all_reduce(max) float32 16 B [4] at train.py:8"
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


def test_without_verify_silence_is_reported_with_all_stacks(finished: Finished) -> None:
    done = finished["is silent"]
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


def pretend(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of running a script: these calls, and status 0."""

    def run(launch: Launch, watch: Watch) -> tuple[int, None]:
        Path(launch.settings.directory, "1.jsonl").write_text(
            "".join(json.dumps(call.to_json()) + "\n" for call in calls)
        )
        return 0, None

    monkeypatch.setattr(traced, "run", run)
    monkeypatch.chdir(Path(cli.__file__).parent)


def test_a_script_without_communication_has_no_records(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend([], monkeypatch)
    assert cli.main(["trace", "--json", "main.py"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["ranks"], document["records"], document["disagreements"]) == (1, [], [])


def test_ranks_that_disagree_make_the_status_1_though_the_script_succeeds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {
        "dtype": "float32",
        "payload_bytes": 4,
        "group": "0",
        "ranks": (0, 1),
        "source": "[a].py:1",
    }
    both = [Call(rank, "all_reduce", detail="[layer]", **fields) for rank in (0, 1)]
    pretend([*both, Call(0, "all_gather", **fields)], monkeypatch)
    assert cli.main(["trace", "--nproc", "2", "main.py", "-x"]) == 1
    shown = capsys.readouterr().out
    assert "[a].py:1" in shown and "[layer]" in shown, "brackets are no markup"
    assert "main.py -x, ranks 0, 1: 1 call, 4 B payload" in shown
    assert "call 2: rank 0: all_gather float32 4 B at [a].py:1; rank 1: no such call (its last: all_reduce" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["absent.py"], "absent.py: no such file"),
        (["--nproc", "0", "main.py"], "nproc must be at least 1, got 0"),
        (["--nproc", "two", "main.py"], "'--nproc'"),
        (["--timeout", "0", "main.py"], "timeout must be a number of seconds above 0, got 0"),
        (["--timeout", "nan", "main.py"], "got nan"),
        (["."], ".: is a directory"),
        ([], "SCRIPT"),
    ],
)
def test_wrong_input_is_one_line_and_starts_nothing(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(cli.__file__).parent)
    assert cli.main(["trace", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("shardiff: ") and says in err


TORCHRUNS = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TORCHRUNS |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize(
    ("variables", "arguments", "says"),
    [
        ({"RANK": "0"}, ["main.py"], "not by torchrun"),
        ({**TORCHRUNS, "TORCHELASTIC_USE_AGENT_STORE": "False"}, ["main.py"], "not by torchrun"),
        ({**TORCHRUNS, "RANK": "x"}, ["main.py"], "RANK must be a number, got 'x'"),
        (
            {**TORCHRUNS, "LOCAL_WORLD_SIZE": "4"},
            ["--nproc", "2", "main.py"],
            "torchrun has started 4 processes already",
        ),
        (
            {**TORCHRUNS, "LOCAL_WORLD_SIZE": "2"},
            ["--verify", "main.py"],
            "verify needs all processes on one machine",
        ),
    ],
)
def test_an_environment_that_others_have_set_is_not_overwritten(
    variables: dict[str, str],
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(cli.__file__).parent)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["trace", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_the_environment_is_torchruns() -> None:
    variables = environment(1, 4, 12345)
    assert (variables["RANK"], variables["LOCAL_RANK"], variables["WORLD_SIZE"]) == ("1", "1", "4")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("127.0.0.1", "12345")


def test_what_processes_wrote_is_read_by_rank(tmp_path: Path) -> None:
    first = [Call(1, "recv", "float32", 4, peer=0), Call(1, "wait", of=0)]
    tmp_path.joinpath("7.jsonl").write_text(
        "".join(json.dumps(call.to_json()) + "\n" for call in first) + '{"rank": 1, "o'
    )
    os.utime(tmp_path / "7.jsonl", (1, 1))
    tmp_path.joinpath("5.jsonl").write_text("".join(json.dumps(call.to_json()) + "\n" for call in first))
    nobody, rank = read(tmp_path)
    assert nobody == []
    assert [call.of for call in rank] == [None, 0, None, 2], "a later process of the same rank counts on"


def test_groups_are_short() -> None:
    def text(**fields: Any) -> str:
        return members(record("broadcast", "float32", 4, None, **fields))

    assert text(groups=((0, 1, 2, 3),), axis="tp") == "tp 0-3"
    assert text(groups=((0, 2), (1, 3))) == "0,2 1,3"
    assert text(edges=((0, 1), (1, 2))) == "0>1 1>2"
    assert text(groups=tuple((i,) for i in range(9))) == "0 1 2 3 ... 5 more"
