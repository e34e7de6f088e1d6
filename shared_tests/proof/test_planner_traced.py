"""What the planner lists for a rank is what a trace of its step shows: the calls, in that order, and their bytes."""

from __future__ import annotations

import pytest

from contract.axes import parse_axes
from contract.planner.instructions import Begin, Send
from contract.planner.program import step
from contract.problem import Problem
from contract.strategy import Run
from shardiff.devices import Device
from shared_tests.on_ranks import every

DEVICE = Device("any", {"float32": 1e9, "float64": 1e9, "bfloat16": 1e9}, 1e12, 1e9, roofline=False)
MESHES = [
    "dp=2",
    "fsdp=2",
    "tp=2",
    "pp=2",
    "zero1: fsdp=2",
    "zero2: fsdp=2",
    "tensor_parallel: tp=2",
    "fsdp=2,tp=2",
    "tp=2,fsdp=2",
    "dp=2,fsdp=2",
    "dp=2,tp=2",
    "zero1: fsdp=2,tp=2",
    "tensor_parallel: fsdp=2,tp=2",
    "pp=2,fsdp=2",
    "dp=2,pp=2",
    "pp=2,tp=2",
    "zero1: pp=2,fsdp=2",
    "zero2: pp=2,fsdp=2",
    "zero2: fsdp=2,tp=2",
    "zero2: dp=2,fsdp=2",
    "zero1: dp=2,fsdp=2",
]


def run(mesh: str, dtype: str = "float32") -> Run:
    strategy, _, axes = mesh.rpartition(": ")
    strategies = (strategy,) if strategy else ()
    problem = Problem(16, 16, 4, dtype=dtype)
    return Run("torch", parse_axes(axes, strategies), problem, microbatches=2, device="cpu")


RUNS = [*map(run, MESHES), run("dp=2", "bfloat16"), run("zero1: fsdp=2", "bfloat16")]


@pytest.fixture(scope="module")
def traced(pool) -> dict[Run, list[tuple[str, int]]]:
    from torch_impl.traced import trace_rank

    found = {}
    for size in (2, 4):
        runs = [one for one in RUNS if one.world_size == size]
        of_first = pool.call(every, trace_rank, [(one,) for one in runs], world_size=size)[0]
        found |= {
            one: [(call.op, call.payload_bytes) for call in calls] for one, calls in zip(runs, of_first, strict=True)
        }
    return found


@pytest.mark.parametrize("one", RUNS, ids=lambda one: f"{one.strategies}-{one.mesh}-{one.problem.dtype}")
def test_a_rank_sends_what_the_planner_lists_in_that_order(one, traced):
    listed = []
    for each in step(one, 0, DEVICE):
        if isinstance(each, Begin):
            listed.append((each.op, each.payload))
        elif isinstance(each, Send):
            listed.append(("send", each.size))
    assert len(listed) > 0
    assert [call for call in traced[one] if call[0] not in ("wait", "mark", "recv")] == listed
