"""`shardiff bench collectives`: right values, right arithmetic, and a file that is whole at every moment. No timing."""

from __future__ import annotations

import json
from itertools import count

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from benchmarks import terminal
from benchmarks.collectives import picture, timing, view
from benchmarks.collectives.collectives import parse_size, plan, run, sweep
from benchmarks.collectives.floor import floor
from benchmarks.collectives.numbers import bandwidths, fit, flat, rows, statistics
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
    keys = "implementation op ranks mode alpha_s beta_GBps bus_beta_GBps relative_error"
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


class Clock:
    """perf_counter that a call moves on by what it costs."""

    def __init__(self, cost):
        self.now, self.cost, self.calls, self.barriers = 0.0, cost, 0, 0

    def side(self):
        def call():
            self.calls += 1
            self.now += self.cost

        def agree(number):
            self.barriers += 1
            self.now += 100.0  # must not be timed
            return number

        return timing.Side(call, lambda result: None, agree)


@pytest.mark.parametrize(
    ("cost", "iterations", "calls"),
    [(2**-10, 20, 102), (2**-20, 20, 1000), (2**-4, 20, 7), (1.0, 10, 4), (32.0, 3, 1)],
    ids=["short", "very short", "long", "beyond the budget", "far beyond the budget"],
)
def test_a_call_is_timed_alone_and_as_often_as_the_budget_allows(cost, iterations, calls, monkeypatch):
    clock = Clock(cost)
    monkeypatch.setattr(timing, "perf_counter", lambda: clock.now)
    times = timing.measure(clock.side(), 20, budget=10.0)
    assert len(times["per_iteration"]) == iterations and times["calls"] == calls
    assert len(times["amortized"]) == 3
    np.testing.assert_allclose(times["per_iteration"] + times["amortized"], cost, rtol=1e-6)
    assert clock.calls == (1 if cost > 10 / 3 else 3) + iterations + 3 * calls


def test_the_clock_runs_from_a_barrier_to_the_end_of_the_call(monkeypatch):
    """Warm-up, iterations and batches of one call alike: a call and its wait are timed, a barrier follows."""
    log = []
    monkeypatch.setattr(timing, "perf_counter", lambda: log.append("clock") or 0.0)
    side = timing.Side(lambda: log.append("call"), lambda _: log.append("wait"), lambda _: log.append("barrier") or 1.0)
    timing.measure(side, 4, budget=10.0, bare=True)
    assert log == ["clock", "call", "wait", "clock", "barrier"] * (3 + 4 + 2 * 10)


def test_calls_under_way_are_bounded():
    waiting, most, numbers = set(), [], count()

    def call():
        number = next(numbers)
        waiting.add(number)
        most.append(len(waiting))
        return number

    timing.measure(timing.Side(call, waiting.discard, lambda number: max(number, 0.01), depth=4), 20, 10.0)
    assert max(most) == 4 and not waiting


def test_an_iteration_takes_as_long_as_its_slowest_rank():
    found = statistics([[1.0, 2.0, 9.0], [4.0, 1.0, 3.0]])  # slowest: 4 2 9; medians of the ranks: 2 3
    assert found == {
        "min_s": 2.0,
        "median_s": 4.0,
        "p99_s": 9.0,
        "rank_min_s": 2.0,
        "rank_mean_s": 2.5,
        "rank_max_s": 3.0,
    }


def test_p99_is_by_nearest_rank():
    times = list(map(float, range(200, 0, -1)))
    assert statistics([times])["p99_s"] == 198.0
    assert statistics([times])["median_s"] == 100.5
    assert statistics([times[:20]])["p99_s"] == 200.0


@pytest.mark.parametrize(
    ("op", "factor"),  # nccl-tests, doc/PERFORMANCE.md, at 8 ranks
    [("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("all_to_all", 0.875)]
    + [("gather", 0.875), ("scatter", 0.875), ("broadcast", 1), ("reduce", 1), ("permute", 1)],
)
def test_bandwidths_follow_nccl_tests(op, factor):
    found = bandwidths(op, 8, 400_000_000, 0.0016)
    assert found["algbw_GBps"] == pytest.approx(250.0)
    assert found["busbw_GBps"] == pytest.approx(250.0 * factor)


def test_one_rank_has_no_bus():
    assert bandwidths("all_reduce", 1, 1000, 1e-6) == {"algbw_GBps": pytest.approx(1.0), "busbw_GBps": 0.0}


def test_rows_are_of_the_slowest_rank_and_wrong_if_one_rank_is():
    def measured(seconds, correct):
        fields = {"bytes": 8000, "runs_as": "all_reduce", "calls": 5, "correct": correct}
        return [{**fields, "per_iteration": [seconds] * 4, "amortized": [seconds] * 3}]

    one, many = rows("torch", "all_reduce", 2, [measured(1e-6, True), measured(2e-6, False)])
    assert (one["mode"], one["iterations"], many["mode"], many["iterations"]) == ("per_iteration", 4, "amortized", 15)
    assert one["median_s"] == 2e-6 and one["algbw_GBps"] == one["busbw_GBps"] == pytest.approx(4.0)
    assert not one["correct"]


def test_a_fit_recovers_alpha_and_beta_from_every_size_and_past_outliers():
    sizes = [1024 * 4**i for i in range(10)]
    times = [50e-6 + size / 2e9 for size in sizes]
    assert fit(sizes, times)[:2] == (pytest.approx(50e-6), pytest.approx(2e9))
    times[2] *= 30
    times[6] *= 0.5
    assert fit(sizes, times)[:2] == (pytest.approx(50e-6, rel=0.01), pytest.approx(2e9, rel=0.01))


def test_a_fit_gives_every_size_a_say_whatever_its_time():
    """Off by 3 % up and down; of the largest sizes, that is a hundred times the latency."""
    sizes = [1024 * 4**i for i in range(10)]
    times = [(50e-6 + size / 2e9) * (1.03 if i % 2 else 0.97) for i, size in enumerate(sizes)]
    alpha, beta, misfit = fit(sizes, times)
    assert (alpha, beta) == (pytest.approx(50e-6, rel=0.04), pytest.approx(2e9, rel=0.04))
    assert 0.02 < misfit < 0.07


def test_a_fit_has_no_negative_latency_and_no_bandwidth_without_growth():
    alpha, beta, _ = fit([1, 2, 4, 8], [1, 2.2, 4.6, 10])
    assert alpha == 0 and beta is not None
    alpha, beta, _ = fit([1, 2, 4, 8], [3.0, 3.0, 3.0, 2.5])
    assert (alpha, beta) == (pytest.approx(3.0, rel=1e-3), None)


def row(implementation, op, ranks, payload, busbw):
    fields = {"implementation": implementation, "op": op, "ranks": ranks, "bytes": payload, "busbw_GBps": busbw}
    return {**fields, "mode": "per_iteration"}


def test_flat_compares_the_largest_payload_that_both_world_sizes_have():
    measured = [
        row("torch", "all_reduce", 2, 1024, 0.1),
        row("torch", "all_reduce", 2, 4096, 2.0),
        row("torch", "all_reduce", 4, 4096, 1.0),
        row("torch", "permute", 2, 4096, 2.0),
        row("torch", "permute", 4, 4096, 1.9),
    ]
    found = flat(measured, cores=2)
    assert found is not None and not found["is_flat"]
    assert {one["op"]: (one["bytes"], one["ratio"]) for one in found["ratios"]} == {
        "all_reduce": (4096, 0.5),
        "permute": (4096, 0.95),
    }
    assert found["sentence"] == (
        "busbw is not flat from 2 to 4 ranks at the largest payload: in torch it becomes 0.72 times what it was "
        "(median of 2 ops; 0.50 all_reduce to 0.95 permute); 4 ranks share 2 cores."
    )
    steady = flat(measured[3:], cores=8)
    assert steady is not None and steady["is_flat"]
    assert steady["sentence"] == (
        "busbw is flat from 2 to 4 ranks at the largest payload: in torch it becomes 0.95 times what it was."
    )
    assert flat(measured[:2], cores=8) is None


def test_the_floor_moves_what_it_says():
    found = floor([2], payload=1 << 21, repeats=1)
    assert found["memory_copy_GBps"] > 0 and all(one > 0 for one in found["loopback_GBps"].values())


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


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "out.json"
    write(path, {"old": 1})
    with pytest.raises(ValueError):
        write(path, {"new": float("nan")})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


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


def test_sizes_are_read_and_swept():
    assert [parse_size(text) for text in ("7", "1KiB", "2 kB", "16MiB", "4GiB", "3MB")] == [
        7,
        1024,
        2000,
        1 << 24,
        1 << 32,
        3_000_000,
    ]
    assert sweep("1KiB", "100KiB") == [1024, 4096, 16384, 65536]


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
