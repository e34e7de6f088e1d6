"""How the figures of a collective follow from its seconds: timing, statistics, bandwidths, fits. No ranks start."""

from __future__ import annotations

from itertools import count

import msgspec
import numpy as np
import pytest

from benchmarks.collectives import timing, view
from benchmarks.collectives.collectives import parse_size, sweep
from benchmarks.collectives.floor import floor
from benchmarks.collectives.numbers import bandwidths, fit, fits, flat, rows, statistics
from benchmarks.documents.collectives import Fit


class Clock:
    """A perf_counter that each call advances by what it costs."""

    def __init__(self, cost):
        self.now, self.cost, self.calls, self.barriers = 0.0, cost, 0, 0
        self.renewed, self.checked = [], []

    def side(self):
        def call():
            self.calls += 1
            self.now += self.cost

        def agree(number):
            self.barriers += 1
            self.now += 100.0  # must not be timed
            return number

        return timing.Side(call, lambda result: None, agree, renew=self.renew, right=self.right)

    def renew(self, calls):
        self.now += 100.0  # nor this
        self.renewed.append(calls)

    def right(self, result, calls):
        self.now += 100.0  # nor this
        self.checked.append(calls)
        return calls == 1 or len(self.checked) % 2 == 1  # all but the second of three batches


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
    warm_up = 1 if cost > 10 / 3 else 3
    assert clock.calls == warm_up + iterations + 3 * calls
    assert clock.checked == [1] * iterations + [calls] * 3, "every single call, and the last of every batch"
    assert clock.renewed == [1] * (warm_up + iterations - 1) + [calls] * 4
    assert times["right"] == {"per_iteration": True, "amortized": calls == 1}


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
        right = {"per_iteration": True, "amortized": correct}
        fields = {"bytes": 8000, "runs_as": "all_reduce", "calls": 5, "correct": True, "right": right}
        return [{**fields, "per_iteration": [seconds] * 4, "amortized": [seconds] * 3}]

    one, many = rows("torch", "all_reduce", 2, [measured(1e-6, True), measured(2e-6, False)])
    assert (one["mode"], one["iterations"], many["mode"], many["iterations"]) == ("per_iteration", 4, "amortized", 15)
    assert one["median_s"] == 2e-6 and one["algbw_GBps"] == one["busbw_GBps"] == pytest.approx(4.0)
    assert one["correct"] and not many["correct"], "as each mode was found"


def test_a_fit_recovers_alpha_and_beta_from_every_size_and_past_outliers():
    sizes = [1024 * 4**i for i in range(10)]
    times = [50e-6 + size / 2e9 for size in sizes]
    assert fit(sizes, times)[:2] == (pytest.approx(50e-6), pytest.approx(2e9))
    times[2] *= 30
    times[6] *= 0.5
    assert fit(sizes, times)[:2] == (pytest.approx(50e-6, rel=0.01), pytest.approx(2e9, rel=0.01))


def test_a_fit_gives_every_size_a_say_whatever_its_time():
    """The times are off by 3 % in both directions; at the largest sizes, that is a hundred times the latency."""
    sizes = [1024 * 4**i for i in range(10)]
    times = [(50e-6 + size / 2e9) * (1.03 if i % 2 else 0.97) for i, size in enumerate(sizes)]
    alpha, beta, misfit = fit(sizes, times)
    assert (alpha, beta) == (pytest.approx(50e-6, rel=0.04), pytest.approx(2e9, rel=0.04))
    assert 0.02 < np.median(misfit) < 0.07


def test_a_fit_is_made_from_five_sizes_on_and_its_largest_misfit_told_beside_the_median():
    def measured(count):
        sizes = [1024 * 4**i for i in range(count)]
        times = [(50e-6 + size / 2e9) * (1.5 if i == 1 else 1.0) for i, size in enumerate(sizes)]
        fields = {"implementation": "torch", "op": "all_reduce", "ranks": 2, "mode": "per_iteration"}
        return [{**fields, "bytes": size, "median_s": time} for size, time in zip(sizes, times, strict=True)]

    assert fits(measured(2)) == fits(measured(4)) == []
    [enough] = fits(measured(5))
    assert enough["relative_error"] < 0.01 and enough["largest_relative_error"] == pytest.approx(1 / 3, rel=0.05)
    assert view.off_by(msgspec.convert({**enough, "relative_error": None}, Fit)) == "-"  # of three sizes, once
    assert view.off_by(msgspec.convert(enough, Fit)) == "0%, most 33%"
    before = {key: value for key, value in enough.items() if key != "largest_relative_error"}
    assert view.off_by(msgspec.convert(before, Fit)) == "0%"


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
