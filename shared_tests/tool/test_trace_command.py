"""How `shardiff trace` treats its arguments, the environment, and what the processes wrote. No script runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardiff.cli import main as cli
from shardiff.cli.trace import OPTIONS
from shardiff.diff.record_view import members
from shardiff.record import record
from shardiff.tracing import traced
from shardiff.tracing.calls import Call
from shardiff.tracing.script import Launch, Watch, environment
from shardiff.tracing.traced import read


def pretend(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of running a script, give these calls and status 0."""

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
        (["--nproc", "-1", "main.py"], "nproc must be at least 1, or 0 for a script that starts its own ranks; got -1"),
        (["--nproc", "two", "main.py"], "'--nproc'"),
        (["--timeout", "0", "main.py"], "timeout must be a number of seconds above 0, got 0"),
        (["--timeout", "nan", "main.py"], "got nan"),
        (["."], ".: is a directory"),
        (["-m", "no_such.module"], "no module named 'no_such' here"),
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


def test_what_one_may_have_meant_otherwise_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend([], monkeypatch)
    (tmp_path / "train.py").write_text("parser.add_argument('--steps')")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["trace", "train.py", "--steps", "3", "--nproc=4"]) == 0
    told = "--nproc was given to train.py; an option of shardiff stands before it"
    shown = capsys.readouterr().out
    assert shown == f"train.py --steps 3 --nproc=4, rank 0: no communication\nNote:\n{told}\n"
    known = {option for each in cli._command().commands["trace"].params for option in each.opts}
    assert set(OPTIONS) == {option for option in known if option.startswith("--")} - {"--module"}


def test_a_script_whose_processes_each_start_ranks_is_pointed_out(tmp_path: Path) -> None:
    watch = traced.Silence(tmp_path, 1.0)
    watch.started([1, 2])
    assert watch.twice() == []
    for pid in (3, 4):
        (tmp_path / f"{pid}.jsonl").touch()
    assert watch.twice() == [
        "the script starts its own ranks, and has done so in each process that --nproc asks for: use --nproc 0"
    ]
    (tmp_path / "1.jsonl").touch()
    assert watch.twice() == [], "a rank may start others that communicate too"


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
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} & environment(0, 0, 0).keys()


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
