"""`shardiff bench steps`: what it refuses, one run of everything, and how a failure is told."""

from __future__ import annotations

import io
import json
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing import Pipe

import pytest

from benchmarks import turns
from benchmarks.documents.results_io import parse_as
from benchmarks.documents.steps import Steps
from benchmarks.steps import picture, steps, view
from contract.problem import Problem
from shared_tests.bench.pools import shared
from shared_tests.bench.report_documents import stepped

BEFORE_FORK = ("benchmarks.steps.torch", "torch._dynamo")
SMALL = Problem(batch=8, width=16, layers=4)


@pytest.fixture(scope="module", autouse=True)
def ranks(pool):
    with shared(pool):
        yield


def test_results_come_by_rank_whoever_answers_first(monkeypatch):
    pairs = [Pipe() for _ in range(3)]
    for rank, (_, peer) in enumerate(pairs):
        peer.send(rank)
    monkeypatch.setattr(turns, "wait", lambda connections, timeout: [connections[-1]])  # the last rank first
    ranks = turns.Ranks([connection for connection, _ in pairs], Future())
    assert ranks.call("name", 1, 2) == [0, 1, 2]
    assert [peer.recv() for _, peer in pairs] == [("name", (1, 2))] * 3
    for connection in (connection for pair in pairs for connection in pair):
        connection.close()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--speed-batch", "0"], "speed-batch must be at least 1, got 0"),
        (["--iterations", "0"], "iterations must be at least 1, got 0"),
        (["--iterations", "2", "--rounds", "3"], "2 iterations cannot be split into 3 rounds"),
        (["--implementation", "tensorflow"], "unknown implementation 'tensorflow'"),
        (["--ranks", "3", "--strategy", "tensor_parallel"], "width 1024, degree 3"),
        (["--batch", "10"], "batch 10, microbatches 4"),
        (["--reshard", "maybe"], "reshard is true or false, got 'maybe'"),
        (
            ["--reshard", "true", "--strategy", "zero1"],
            "reshard is of fully_sharded, which is not among the strategies",
        ),
        (["--reshard", "true", "--mesh", "fsdp=2,pp=2"], "reshard must be false"),
        (["--recompute", "offload"], "offload is compared with a step that keeps everything"),
        (["--timeout", "nan"], "timeout must be a number of seconds"),
        (["--output", "no/such/folder/a.json"], "the output must be a .json file"),
        (["--picture", "a.jpg"], "the picture must be a .png file"),
    ],
)
def test_wrong_input_is_refused_in_a_line_before_anything_starts(arguments, reason, capsys):
    from benchmarks.commands import bench

    with pytest.raises(SystemExit) as ended:
        bench(["steps", *arguments])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert reason in told and told.count("\n") == 1


def test_one_run_of_everything_and_what_it_shows(tmp_path):
    from rich.console import Console

    plan = steps.plan(
        [2], ["single_device", "tensor_parallel"], steps.IMPLEMENTATIONS, replace(SMALL, layers=2),
        iterations=2, rounds=2, device="cpu", timeout=100, speed_batch=16,
    )  # fmt: skip
    saved = []
    document = steps.measure(plan, lambda so_far: saved.append(json.dumps(so_far, allow_nan=False)))
    assert document["failures"] == [] and document["complete"]
    assert json.loads(saved[-1]) == document
    assert [json.loads(each)["complete"] for each in saved] == [False] * (len(saved) - 1) + [True]
    assert any(not json.loads(each)["rows"][0]["loss"] for each in saved), "saved before the strategy was finished"

    rows = {(row["ranks"], row["implementation"]): row for row in document["rows"]}
    assert set(rows) == {(1, name) for name in ("torch", "modules", "shard_map", "annotated", "jit")} | {
        (2, name) for name in ("torch", "dtensor", "shard_map", "annotated")
    }
    for row in rows.values():
        share = row["exposed_share"]  # None where a step without communication took longer, as noise may have it
        noisy = share is None and row["ranks"] > 1 and row["framework"] == "torch"
        assert noisy or 0 <= share <= 1, row["implementation"]
        assert len(row["samples_seconds"]) == 2
        for kind in ("parameters", "gradients", "optimizer_state"):
            held, formula = row["memory"]["measured"][kind], row["memory"]["closed_form"][kind]
            assert held == pytest.approx(formula, rel=0.1), (row["implementation"], kind)
    assert rows[2, "annotated"]["wire_bytes_compiled"] >= rows[2, "annotated"]["wire_bytes"] > 0
    pairs = {(row["ranks"], row["of"], row["to"]) for row in document["ratios"]}
    assert {(2, "torch", "dtensor"), (2, "shard_map", "annotated"), (1, "annotated", "jit")} <= pairs
    assert [row["framework"] for row in document["single_device"]] == ["torch", "jax"]

    result = parse_as(Steps, document)
    picture.picture(result, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 10_000
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    for part in view.parts(result):
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
    text = console.export_text()
    console.file.close()
    assert "tensor_parallel" in text and "dtensor" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_mesh_of_three_axes_fits_into_120_columns():
    from rich.console import Console

    document, names = stepped(), ("data_parallel", "fully_sharded", "megatron_tensor_parallel")
    for row in (*document["rows"], *document["ratios"]):
        row |= {"ranks": 128, "strategy": " x ".join(names), "mesh": "dp=8,fsdp=8,tp=2"}
    document["rows"][1]["implementation"] = "dtensor_fsdp2"
    result = parse_as(Steps, document)
    console = Console(width=120, record=True, file=io.StringIO())
    for part in (view.step_table(result), view.ratio_table(result)):
        console.print(part)
    text = console.export_text()
    assert all(text.count(name) == 3 for name in (*names, "fsdp=8", "tp=2"))  # of the contestants, and of two ratios
    assert text.count("dtensor_fsdp2") == 1 and "\u2026" not in text


def test_a_failing_rank_is_told_in_its_own_words():
    with pytest.raises(
        RuntimeError, match="rank 0 of 1 raised in phase block.*\n.*(?s:.)*unsupported operand"
    ) as failed:
        with turns.ranks("torch", 1, "benchmarks.steps.torch", "cpu", 60) as ranks:
            assert ranks.call("block", 1, 0) == [{}]
            ranks.call("block", None, 0)
    assert type(failed.value).__name__ == "WorkerError" and "unsupported operand" in str(failed.value)
