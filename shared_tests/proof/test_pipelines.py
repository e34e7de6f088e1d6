"""Every schedule gives the reference's loss and gradients, sends what the closed form says, and keeps what it says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from contract import cost
from contract.axes import parse_axes
from contract.layout import merge
from contract.memory import memory
from contract.problem import Problem
from contract.schedule import SCHEDULES, unfit
from contract.strategy import Run
from shardiff.tracing.merge import merge as merge_calls
from shared_tests import evidence, on_ranks

SIZES = Problem(batch=13, width=8, layers=8, dtype="float64")  # microbatches of different sizes


def make(mesh: str, schedule: str, microbatches: int, *strategies: str, **rest) -> Run:
    axes = parse_axes(mesh, strategies)
    settings = {"problem": SIZES, "steps": 1, "device": "cpu", "schedule": schedule, "microbatches": microbatches}
    return Run("torch", axes, **{**settings, **rest})


ALONE = [
    make(mesh, schedule, m, problem=replace(SIZES, layers=9 if schedule == "zb_v" else 8))
    for mesh, stages in (("pp=2", 2), ("pp=4", 4))
    for schedule in SCHEDULES
    for m in (1, 2, 4, 8)
    if unfit(schedule, stages, m) is None
]
THREE_CHUNKS = [make("pp=2", "interleaved", 4, chunks=chunks) for chunks in (3, 4)]
COMPOSED = [
    make(mesh, schedule, 4, *strategies, **rest)
    for schedule in SCHEDULES
    for mesh, strategies, rest in (
        ("dp=2,pp=2", (), {}),
        ("dp=2,pp=2", (), {"overlap": False}),
        ("pp=2,dp=2", (), {"overlap": False}),
        ("pp=2,tp=2", ("tensor_parallel",), {}),
        ("pp=2,tp=2", ("megatron_tensor_parallel",), {}),
    )
]
RUNS = [*ALONE, *THREE_CHUNKS, *COMPOSED]


@pytest.fixture(scope="module")
def results(pool):
    """Run -> what every rank tells of it. All runs of as many ranks are one call."""
    told_of = {}
    for ranks in (2, 4):
        runs = [run for run in RUNS if run.world_size == ranks]
        by_rank = pool.call(on_ranks.passes, runs, world_size=ranks)
        told_of |= dict(zip(runs, zip(*by_rank, strict=True), strict=True))
    return told_of


def label(run: Run) -> str:
    return f"{run.strategy} {run.mesh} {run.schedule} m={run.microbatches} overlap={run.overlap}"


def test_loss_and_gradients_do_not_depend_on_the_schedule(results, reference_of):
    for run, ranks in results.items():
        want = reference_of(run)
        assert {rank[0] for rank in ranks} == {ranks[0][0]}, label(run)
        assert abs(ranks[0][0] - want.losses[0]) <= 1e-12 * want.losses[0], label(run)
        for i, (got, grad) in enumerate(zip(merge(run, [rank[1] for rank in ranks]), want.grads, strict=True)):
            for name, mine, theirs in zip("wb", got, grad, strict=True):
                error = np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
                assert error <= 1e-12, f"{label(run)}: gradient of {name}{i} differs by {error}"


def test_what_is_kept_is_the_closed_form_s_to_the_byte(results):
    for run, ranks in results.items():
        kept = [rank[2] for rank in ranks]
        want = [each.activations for each in memory(run)]
        assert kept == want, label(run)


def test_1f1b_keeps_p_microbatches_and_not_m(results):
    def peaks(schedule: str, m: int) -> list[int]:
        run = next(r for r in ALONE if (str(r.mesh), r.schedule, r.microbatches) == ("pp=4", schedule, m))
        return [rank[2] for rank in results[run]]

    assert peaks("1f1b", 8)[0] * 13 == peaks("gpipe", 8)[0] * 8  # 4 microbatches of 2 rows, of 13 rows
    assert peaks("1f1b", 8)[3] * 13 == peaks("gpipe", 8)[3] * 2  # 1 microbatch
    assert peaks("1f1b", 8)[0] == peaks("zb_h1", 8)[0] and peaks("naive", 8)[0] * 13 == peaks("gpipe", 8)[0] * 2


TRACED = [
    *(make("pp=4", schedule, 4) for schedule in ("1f1b", "interleaved", "zb_h1", "zb_v")),
    make("pp=2,tp=2", "interleaved", 2, "tensor_parallel"),
    make("dp=2,pp=2", "1f1b", 3, overlap=False),
]


def test_messages_are_the_closed_form_s_record_by_record(pool):
    by_rank = pool.call(on_ranks.passes, TRACED, True, world_size=4)
    for run, ranks in zip(TRACED, zip(*by_rank, strict=True), strict=True):
        traced = run.mesh.named(merge_calls([rank[3] for rank in ranks]))
        assert evidence.told(traced) == evidence.told(cost.communication(run)), label(run)


def test_what_crosses_each_boundary_does_not_depend_on_the_order():
    for schedule in SCHEDULES:
        edges: Counter = Counter()
        for record in cost.communication(make("pp=4", schedule, 8)):
            edges.update(record.edges or ())
        times = {"interleaved": 2, "zb_v": 2}.get(schedule, 1)  # chunks
        ring = {"interleaved": [(3, 0), (0, 3)]}.get(schedule, [])
        assert all(edges[a, b] == edges[b, a] == times * 8 for a, b in ((0, 1), (1, 2), (2, 3))), schedule
        assert [edges[edge] for edge in ring] == [8] * len(ring)
