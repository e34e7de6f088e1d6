"""Collectives that go through the host's memory give the same values as without, as where ranks share a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu.proofs import run_torch
from contract.axes import STRATEGIES, one_axis, parse_axes
from contract.problem import Problem
from contract.proof import prove
from contract.strategy import Run
from shardiff.ranks.supervisor import Workers
from shardiff.ranks.torch_pool import workers
from shared_tests import on_ranks

RANKS = 4
OPS = {
    "broadcast": {"root": 1},
    "scatter": {"root": 1},
    "gather": {"root": 2},
    "reduce": {"root": 2},
    "all_gather": {"dim": 1},
    "reduce_scatter": {"dim": 1},
    "all_reduce": {},
    "all_to_all": {},
}


@pytest.fixture(scope="module")
def staged():
    with workers(RANKS, "cpu", timeout=60, staged=True) as pool:
        yield pool


def every_op(device: torch.device, xs: list[np.ndarray]) -> dict[str, list[on_ranks.Value]]:
    """All collectives of torch_impl, and point to point around a ring, on this rank's array."""
    results = {op: on_ranks.collectives(device, op, [(arguments, xs)]) for op, arguments in OPS.items()}
    rank, x = dist.get_rank(), on_ranks.tensor(xs[dist.get_rank()])
    got = torch.empty_like(x)
    works = [dist.irecv(got, (rank - 1) % RANKS), dist.isend(x, (rank + 1) % RANKS)]
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier()
    return {**results, "ring": [on_ranks.value(got)]}


def before_and_after_wait(device: torch.device) -> tuple[float, float]:
    """An element of an asynchronous sum of ones over the ranks, before it is waited for and afterwards."""
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    before = x[0].item()
    work.wait()
    return before, x[0].item()


def backends(device: torch.device) -> str:
    """The backends of the groups of a mesh."""
    from torch_impl.mesh import make_mesh

    run = Run("torch", parse_axes("dp=2,tp=2"), Problem(8, 8, 2), device="cpu")
    return " ".join(dist.get_backend(make_mesh(run, device).group(axis)) for axis in ("dp", "tp"))


def test_every_collective_gives_what_gloo_gives(pool: Workers, staged: Workers):
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal((8, 8)).astype(np.float32) for _ in range(RANKS)]
    ours, theirs = (one.call(every_op, xs, world_size=RANKS) for one in (staged, pool))
    for rank in range(RANKS):
        assert ours[rank].keys() == theirs[rank].keys()
        for op, (got,) in ours[rank].items():
            (want,) = theirs[rank][op]
            if got is None:  # what is left in the tensors of the other ranks is nobody's
                assert want is None
            else:
                assert got[0] == want[0] and np.array_equal(got[1], want[1]), f"{op} on rank {rank}"


def test_a_result_is_there_once_it_is_waited_for(staged: Workers):
    assert staged.call(before_and_after_wait, world_size=RANKS) == [(1, RANKS)] * RANKS


def test_the_groups_of_a_mesh_are_staged_too(staged: Workers):
    assert staged.call(backends, world_size=RANKS) == ["staged staged"] * RANKS


def sharing(device: str, dtypes: tuple[str, ...]) -> list[Run]:
    axes = [*(one_axis(strategy, RANKS) for strategy in STRATEGIES), parse_axes("dp=2,pp=2")]
    problems = [Problem(16, 16, 4, dtype) for dtype in dtypes]
    return [Run("torch", each, problem, "adamw", 2, 2, device=device) for problem in problems for each in axes]


def equal_the_reference(device: str, dtypes: tuple[str, ...], reference_of) -> list[str]:
    failures, done = [], []

    def add(run, got, seconds):
        done.append(run)
        failures.extend([got] if isinstance(got, str) else prove(run, got, reference_of(run)).failures)

    run_torch(sharing(device, dtypes), device, True, add)
    assert done == sharing(device, dtypes)
    return failures


def test_staged_strategies_equal_the_reference(reference_of):
    assert equal_the_reference("cpu", ("float64",), reference_of) == []


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_equal_the_reference(reference_of):
    assert equal_the_reference("cuda", ("float64", "float32"), reference_of) == []


def test_a_sum_that_is_not_copied_back_is_noticed(staged: Workers):
    assert staged.call(sum_without_copies, world_size=2) == [False, False]


def sum_without_copies(device: torch.device) -> bool:
    """Whether an all_reduce of ones gives the number of ranks although nothing is copied back."""
    from shardiff.ranks import torch_staged

    torch_staged.count = lambda value: 0
    x = torch.ones(3)
    dist.all_reduce(x)
    return bool((x == dist.get_world_size()).all())
