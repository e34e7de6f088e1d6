"""A pool of torch ranks returns results by rank; however a rank fails, the error says so and no process is left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from shardiff.ranks import silence
from shardiff.ranks.rank import this_rank
from shardiff.ranks.supervisor import Workers
from shardiff.ranks.torch_pool import Forked, run_on_ranks, workers
from shardiff.ranks.verdict import WorkerError
from shardiff.system import machine
from shared_tests.tool.rank_functions import (
    Fault,
    assert_gone,
    count,
    double,
    listening,
    pickles_badly,
    rank_sum,
    step,
    with_a_process,
)
from torch_impl import collectives

BEFORE_FORK = ("torch._dynamo",)  # which torch.optim imports at first use
NUM_RANKS = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    """A pool on the CPU, also where there are GPUs; it knows their number."""
    with workers(NUM_RANKS, "auto") as pool:
        forked(pool).device = "cpu"
        yield pool


@pytest.fixture
def patience(pool: Workers) -> Iterator[float]:
    """A short timeout, for calls that get stuck."""
    before, pool.timeout = pool.timeout, 1.6
    yield pool.timeout
    pool.timeout = before


def forked(pool: Workers) -> Forked:
    assert isinstance(pool.processes, Forked)
    return pool.processes


def starter(pool: Workers) -> Any:
    """The process that starts the pool's ranks."""
    return forked(pool).starter


# Calls that succeed


@pytest.mark.parametrize("world_size", [1, 2, 4, 2, 1])
def test_results_come_by_rank(pool: Workers, world_size: int) -> None:
    total = 1.5 * world_size * (world_size - 1) / 2
    expected = [(rank, world_size, total) for rank in range(world_size)]
    assert pool.call(rank_sum, 1.5, world_size=world_size) == expected


def test_a_call_starts_fresh_processes(pool: Workers) -> None:
    first, second = pool.call(step), pool.call(step)
    assert len({*first, *second, os.getpid()}) == 2 * NUM_RANKS + 1


def test_large_arrays_there_and_back(pool: Workers) -> None:
    array = np.arange(8 << 20, dtype=np.float64)
    doubled, zero = pool.call(double, array, world_size=2)
    assert np.array_equal(doubled, 2 * array) and not zero.any() and doubled.flags.writeable


def test_progress_arrives_in_order_from_ranks_that_share_the_cores(pool: Workers) -> None:
    for world_size in (1, NUM_RANKS):
        seen: list[tuple[int, int]] = []
        threads = pool.call(count, world_size=world_size, on_progress=lambda rank, value: seen.append((rank, value[0])))
        assert sorted(seen) == [(rank, i) for rank in range(world_size) for i in range(3)]
        assert [i for rank, i in seen if rank == 0] == [0, 1, 2]
        assert threads == [machine.threads(world_size)] * world_size


def test_two_pools_at_once_and_one_that_outlives_its_starter(pool: Workers) -> None:
    with workers(2, "cpu") as other:
        with ThreadPoolExecutor() as threads:
            calls = [threads.submit(one.call, rank_sum, 2.0, world_size=2) for one in (pool, other)]
            assert [call.result() for call in calls] == [[(0, 2, 2.0), (1, 2, 2.0)]] * 2
        seen: list[int] = []

        def kill_starter(rank: int, value: tuple[int, int]) -> None:
            seen.append(value[1])
            starter(other).kill()

        with pytest.raises(WorkerError, match="the process that starts the ranks failed: killed by SIGKILL"):
            other.call(count, 100, on_progress=kill_starter)
        assert_gone(seen)
        assert len(other.call(step)) == 2


def looked_at(device: torch.device) -> tuple[list[str], list[str], set[str]]:
    """What this rank notes: each collective, and the phases of a step that reports none; and where it listens."""
    this, world = this_rank(), dist.group.WORLD
    assert this is not None and world is not None
    n, rank, x = world.size(), world.rank(), torch.zeros(world.size(), 10)
    calls: list[Callable[[], Any]] = [
        lambda: collectives.broadcast(x, 0, world),
        lambda: collectives.scatter(x if rank == 0 else None, 0, world, like=x[:1]),
        lambda: collectives.gather(x, 0, world),
        lambda: collectives.reduce(x, 0, world),
        lambda: collectives.all_gather(x, world),
        lambda: collectives.reduce_scatter(x, world),
        lambda: collectives.all_reduce(x, world),
        lambda: collectives.all_to_all(x, world),
        lambda: dist.barrier(),
        lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None,
    ]
    found = []
    for call in calls:
        call()
        number, size, op, whom = this.notes.last_call()
        found.append(f"{number} {op} {size} {whom}")
    assert n * 40 == x.nbytes
    phases: list[str] = []
    setattr(this, "report_phase", phases.append)
    w = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.1)
    w.square().sum().backward()
    optimizer.step()
    return found, list(phases), listening()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_note_their_last_collective_and_phase_and_listen_on_loopback_only(pool: Workers) -> None:
    ranks = pool.call(looked_at, world_size=2)
    ops = {"broadcast": 80, "scatter": 80, "gather": 160, "reduce": 80, "all_gather": 160, "reduce_scatter": 80}
    ops |= {"all_reduce": 80, "all_to_all": 80, "barrier": 0}
    expected = [f"{i} {op} {size} ranks 0 1" for i, (op, size) in enumerate(ops.items(), 1)]
    for (noted, phases, addresses), last in zip(ranks, ("1 send to 1", "1 receive from 0"), strict=True):
        assert noted == [*expected, f"{last} 80 ranks 0 1"]
        assert phases == ["backward", "update", "forward"]
        assert addresses and addresses <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("how", [None, "SIGKILL"])
def test_what_a_rank_has_started_ends_with_it(pool: Workers, how: str | None) -> None:
    seen: list[int] = []
    with suppress(WorkerError):
        pool.call(
            with_a_process, how and Fault("forward", how, 0), world_size=2, on_progress=lambda _, pid: seen.append(pid)
        )
    assert len(seen) == 2
    assert_gone(seen)


def test_silence_is_over_when_nobody_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds from the last sign of life, of processes that use no, some and all of a core until they stop at 70 s."""
    for share, limit in ((0.0, 30), (0.1, 100), (1.0, 100)):
        now = 0.0
        monkeypatch.setattr(silence.time, "monotonic", lambda: now)
        monkeypatch.setattr(silence, "seconds_of_work", lambda pid: share * min(now, 70))
        watched = silence.Silence(30, [1, 2])
        while not watched.over():
            now += 0.2
        assert limit - 2 < now < limit + 0.3, share
    monkeypatch.setattr(silence, "seconds_of_work", lambda pid: now)
    watched.heard()
    began = now
    while not watched.over():
        now += 0.2
    assert now - began == pytest.approx(300, abs=1)  # it works, but says nothing: ten times as long


# Calls that cannot work


def test_sizes_and_devices_that_cannot_work_are_refused(pool: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    for world_size in (0, NUM_RANKS + 1):
        with pytest.raises(ValueError, match=f"pool of {NUM_RANKS} ranks cannot run {world_size}"):
            pool.call(rank_sum, world_size=world_size)
    with pytest.raises(ValueError, match="world_size must be 1 to 250, got 0"), workers(0):
        pass
    with pytest.raises(ValueError, match="unknown device 'tpu'"):
        run_on_ranks(rank_sum, world_size=1, device="tpu")
    n = torch.cuda.device_count() + 1
    monkeypatch.setattr(pool.processes, "device", "cuda")
    with pytest.raises(ValueError, match=f"{n} ranks, {n - 1} GPUs"):
        replace(pool, world_size=n).call(rank_sum)


# Calls that fail


def assert_nothing_runs(pool: Workers) -> None:
    """The ranks of a call have ended when it returns, and have been waited for."""
    assert psutil.Process(starter(pool).pid).children() == []


@pytest.mark.parametrize("phase", ["rendezvous", "start-up", "forward", "backward", "update", "teardown"])
@pytest.mark.parametrize("how", ["raise", "SIGKILL"])
def test_failed_rank_is_named_first_with_its_phase(pool: Workers, phase: str, how: str) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool.call(step, Fault(phase, how))
    assert time.monotonic() - began < 10
    assert (caught.value.rank, caught.value.phase) == (2, phase)
    said = str(caught.value)
    if how == "raise":
        assert caught.value.kind == "raised"
        assert said.startswith(f"rank 2 of 4 raised in phase {phase}:\n\nTraceback (most recent call last)")
        assert caught.value.traceback.rstrip().endswith("ValueError: the planted error")
        assert os.path.join("shardiff", "ranks", "rank.py") not in said.partition("rank_functions.py")[0]
    else:
        assert caught.value.kind == "died"
        assert said.startswith(f"rank 2 of 4 died in phase {phase}: killed by SIGKILL")
    assert_nothing_runs(pool)


@pytest.mark.parametrize(
    "how, said",
    [
        ("exit 0", "died in phase backward: it exited with status 0"),
        ("SIGSEGV", "died in phase backward: killed by SIGSEGV\n\nFatal Python error: Segmentation fault"),
        ("allocate", "raised in phase backward:\n\nTraceback"),
    ],
)
def test_how_it_failed_is_said(pool: Workers, how: str, said: str) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.call(step, Fault("backward", how, rank=0), world_size=2)
    assert str(caught.value).startswith(f"rank 0 of 2 {said}")
    assert_nothing_runs(pool)


@pytest.mark.parametrize(
    "phase, how, said",
    [
        ("rendezvous", "SIGSTOP", "it is stopped"),
        ("forward", "sleep", "time.sleep(1000)"),
        ("teardown", "SIGSTOP", "it is stopped"),
    ],
)
def test_stuck_rank_is_named_first_with_its_phase(
    pool: Workers, patience: float, phase: str, how: str, said: str
) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool.call(step, Fault(phase, how))
    assert time.monotonic() - began < patience + 10
    assert (caught.value.rank, caught.value.phase, caught.value.kind) == (2, phase, "stuck")
    assert said in str(caught.value)
    last = "all_reduce no. 1, 400 bytes, ranks 0 1 2 3" if phase in ("forward", "backward") else ""
    waiting = f"rank 0 of 4, in phase {'forward' if last else phase}, waits for others; last call: {last}"
    assert waiting in str(caught.value) or phase == "teardown"
    assert_nothing_runs(pool)


def test_slow_is_not_stuck(pool: Workers, patience: float) -> None:
    assert pool.call(count, patience * 0.4, world_size=1)


def test_result_that_cannot_be_pickled_is_the_ranks_error(pool: Workers) -> None:
    with pytest.raises(WorkerError, match="(?s)rank . of 2 raised in phase teardown.*pickle"):
        pool.call(pickles_badly, world_size=2)


def test_error_in_the_callers_callback_ends_the_ranks(pool: Workers) -> None:
    with pytest.raises(ZeroDivisionError):
        pool.call(count, 100, on_progress=lambda rank, value: 1 // 0)
    assert_nothing_runs(pool)
    assert len(pool.call(step)) == NUM_RANKS
