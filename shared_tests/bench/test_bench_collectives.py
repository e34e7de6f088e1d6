"""`shardiff bench collectives`: right values, right arithmetic, and a file that is whole at every moment. No timing."""

from __future__ import annotations

import json

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from benchmarks import terminal
from benchmarks.collectives import numbers, picture, timing, view
from benchmarks.collectives.collectives import plan, run
from benchmarks.commands import bench
from benchmarks.documents.collectives import OPS, Collectives
from benchmarks.documents.results_io import parse_as
from shardiff.ranks.verdict import WorkerError
from shardiff.system.files import write
from shared_tests.bench.pools import shared

ROW = {
    "implementation": str,
    "op": str,
    "runs_as": str,
    "ranks": int,
    "bytes": int,
    "mode": str,
    "iterations": int,
    "min_s": float,
    "median_s": float,
    "p99_s": float,
    "rank_min_s": float,
    "rank_mean_s": float,
    "rank_max_s": float,
    "algbw_GBps": float,
    "busbw_GBps": float,
    "correct": bool,
}
SIZES = [8, 1024, 4100]  # bytes; the last is no whole number of blocks for two ranks
FEW = 3  # calls of each kind, because the budget allows no more


@pytest.fixture(scope="module", autouse=True)
def ranks(pool):
    with shared(pool):
        yield


@pytest.fixture(scope="module")
def document(ranks):
    """Every op at three sizes, on two ranks of each framework, through JSON."""
    todo = plan(None, [2], SIZES, None, "cpu", iterations=20, budget=1e-6, bare=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbers, "ENOUGH", len(SIZES))
        return json.loads(json.dumps(run(todo), allow_nan=False))


def test_every_op_has_right_values_in_both_frameworks_at_every_size(document):
    found = {(row["implementation"], row["op"], row["bytes"], row["mode"]) for row in document["rows"]}
    modes = ("per_iteration", "amortized", "bare")
    sizes = (8, 1024, 4096)
    assert found == {(i, op, s, m) for i in ("torch", "jax") for op in OPS for s in sizes for m in modes}
    assert [row for row in document["rows"] if not row["correct"]] == []


def test_the_document_keeps_its_schema(document):
    keys = "kind schema machine method settings complete runs floor rows fits identities flat"
    assert list(document) == keys.split() and document["complete"] is True
    for row in document["rows"]:
        assert {key: type(value) for key, value in row.items()} == ROW
        assert 0 < row["min_s"] <= row["median_s"] <= row["p99_s"]
        assert row["rank_min_s"] <= row["rank_mean_s"] <= row["rank_max_s"]
        assert row["iterations"] == FEW
    keys = "implementation op ranks mode alpha_s beta_GBps bus_beta_GBps relative_error largest_relative_error"
    assert all(list(one) == keys.split() for one in document["fits"])
    assert len(document["fits"]) == 2 * 9 * 3
    assert document["flat"] is None  # one world size
    assert document["floor"]["memory_copy_GBps"] > 0 and set(document["floor"]["loopback_GBps"]) == {"1", "2"}
    assert document["settings"]["transport"] == "gloo over loopback"
    assert document["machine"]["cores"] >= 1


def test_the_op_that_really_runs_is_named(document):
    ran = {(row["implementation"], row["op"]): row["runs_as"] for row in document["rows"]}
    rooted = {"broadcast": "all_reduce", "scatter": "reduce_scatter", "gather": "all_gather", "reduce": "all_reduce"}
    for op, name in OPS.items():
        assert ran["torch", op] == name
        assert ran["jax", op] == rooted.get(op, name)


def test_the_identities_hold_exactly_in_both_frameworks(document):
    found = {
        (one["implementation"], one["identity"]): (one["holds"], one["max_difference"])
        for one in document["identities"]
    }
    assert found == {(i, name): (True, 0) for i in ("torch", "jax") for name in timing.IDENTITIES}


def test_tables_and_picture_show_every_op(document, tmp_path, capsys):
    result = parse_as(Collectives, document)
    terminal.show(view.parts(result))
    out = capsys.readouterr().out
    assert all(line in out for line in (*document["method"], "busbw amortized / bare loop", "162 of 162 rows correct"))
    assert all(f" {op} " in out for op in OPS)
    picture.picture(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_values_tell_a_wrong_block_rank_or_sum():
    for op in OPS:
        for rank in range(4):
            want = timing.expected(op, rank, 4, 4096)
            if want is not None:
                assert want.dtype == np.float32 and len(want) == timing.lengths(op, 4096, 4)[1]
                assert not np.array_equal(want, np.roll(want, len(want) // 4))
                assert rank == 0 or not np.array_equal(want, timing.values(rank, 0, len(want)))


def test_an_interrupted_run_keeps_what_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.collectives.collectives.floor", lambda streams: None)
    path, before = tmp_path / "out.json", set(psutil.Process().children())

    def save(document):
        write(path, document)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan(["permute"], [2], [64], ["torch"], "cpu", 2), save)
    kept = json.loads(path.read_text())
    assert kept["complete"] is False and {row["op"] for row in kept["rows"]} == {"permute"}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    assert set(psutil.Process().children()) <= before


def test_a_block_that_fails_is_named_with_the_rank_s_own_error(monkeypatch):
    monkeypatch.setattr("benchmarks.collectives.collectives.floor", lambda streams: None)
    monkeypatch.setattr("benchmarks.collectives.collectives.on_torch", fail)
    with pytest.raises(WorkerError, match="^torch permute on 2 ranks: rank 0 of 2 raised in phase start-up") as caught:
        run(plan(["permute"], [2], [64], ["torch"], "cpu", 2))
    assert "KeyError: 'block'" in str(caught.value)


def fail(device, function, *args):
    import torch.distributed as dist

    if dist.get_rank() == 0:
        raise KeyError(function)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "allreduce"], "unknown op 'allreduce'; known: broadcast, scatter, gather, reduce, all_gather,"),
        (["--implementation", "mpi"], "unknown implementation 'mpi'; known: torch, jax"),
        (["--device", "tpu"], "unknown device 'tpu'; known: auto, cpu, cuda"),
        (["--iterations", "0"], "iterations must be at least 1, got 0"),
        (["--budget", "0"], "budget must be a number of seconds above 0, got 0.0"),
        (["--ranks", "0"], "ranks must be 1 to 64, got 0"),
        (["--ranks", "65"], "ranks must be 1 to 64, got 65"),
        (["--size", "big"], "a size is a number of bytes as in 4KiB, 16MiB, 100MB or 4096, got 'big'"),
        (["--size", "8"], "4 ranks need a payload of at least 16 bytes, got 8"),
        (["--min", "2KiB", "--max", "1KiB"], "--max 1KiB is smaller than --min 2KiB"),
        (["--device", "cuda", "--ranks", "64"], "device cuda needs a GPU for each rank: 64 ranks, "),
        (["--output", "no/such/folder.json"], "the output must be a .json file in an existing folder"),
        (["--picture", "picture.pdf"], "the picture must be a .png file in an existing folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_refused_in_one_line(arguments, message):
    result = CliRunner().invoke(bench, ["collectives", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"shardiff: {message}") and result.stderr.count("\n") == 1


def test_wrong_values_are_named_with_what_is_known_of_them():
    from shared_tests.bench.report_documents import timed

    document = timed()
    by = {(row["implementation"], row["op"], row["ranks"], row["bytes"], row["mode"]): row for row in document["rows"]}
    by["torch", "permute", 4, 1024, "per_iteration"]["correct"] = False
    race = by["jax", "all_reduce", 2, 4096, "per_iteration"]
    race |= {"op": "scatter", "runs_as": "reduce_scatter", "correct": False}
    told = [line for line in view.lines(parse_as(Collectives, document)) if line.startswith("WRONG")]
    assert told[0] == "WRONG: torch permute of 1 KiB on 4 ranks."
    assert told[1].startswith("WRONG: jax scatter of 4 KiB on 2 ranks, at times: gloo's reduce_scatter")
    assert len(told) == 2
