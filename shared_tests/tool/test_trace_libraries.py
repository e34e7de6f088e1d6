"""Whole programs of torch's libraries: set-up, training and update are told apart, and what is moved is named."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shardiff.program import Program
from shardiff.ranks.torch_pool import Workers
from shardiff.tracing.merge import program_of
from shardiff.tracing.tracer import capture
from shared_tests.tool.rank_functions import started


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def train(net: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        net(torch.ones(2, 4))


def ddp_and_zero() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which its import uses
        from torch.distributed.optim import ZeroRedundancyOptimizer
    net = DistributedDataParallel(model())
    train(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1))


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(net, torch.optim.SGD(net.parameters(), 0.1))


def fsdp2() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    net = model()
    for i in (0, 2):
        fully_shard(net[i], mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, torch.optim.SGD(net.parameters(), 0.1))


def pipeline() -> None:
    net, rank = model(), dist.get_rank()
    part = net[: 1 + rank] if rank == 0 else net[1:]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).sum())
    optimizer = torch.optim.SGD(part.parameters(), 0.1)
    for _ in range(2):
        schedule.step(torch.ones(4, 4)) if rank == 0 else schedule.step(target=torch.ones(4, 4))
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS: dict[str, Callable[[], None]] = {
    "ddp_and_zero": ddp_and_zero,
    "tensor_parallel": tensor_parallel,
    "fsdp2": fsdp2,
    "pipeline": pipeline,
}


def trace_programs(device: torch.device) -> dict[str, list[Any]]:
    """On each rank: the calls of each of PROGRAMS."""
    traced = {}
    for name, run in PROGRAMS.items():
        with capture(first_phase="other") as calls:
            run()
        traced[name] = calls
    return traced


@pytest.fixture(scope="module")
def programs(pool: Workers) -> dict[str, Program]:
    ranks = pool.call(trace_programs, world_size=2)
    return {name: program_of([rank[name] for rank in ranks], name) for name in PROGRAMS}


def told(program: Program) -> Counter[tuple[str, str, str | None]]:
    return Counter((r.phase, r.op, r.detail) for r in program for _ in range(r.executions.min))


@pytest.mark.parametrize("name", PROGRAMS)
def test_set_up_and_evaluation_are_no_part_of_a_step(name: str, programs: dict[str, Program]) -> None:
    program = programs[name]
    assert len(program.steps) == 2
    assert {r.phase for r in program.segments.get("set-up", Program(()))} <= {"other"}
    rest = {r.detail for part in program.steps for r in part if r.phase == "other"}
    assert rest == ({"which gradients are in which bucket"} if name == "ddp_and_zero" else set())
    assert {r.phase for r in program.segments.get("rest", Program(()))} <= {"other"}


def test_zeros_broadcasts_are_the_update_and_ddps_of_parameters_the_set_up(programs: dict[str, Program]) -> None:
    program = programs["ddp_and_zero"]
    last = told(program.steps[-1].only("all_reduce"))
    assert last == {("backward", "all_reduce", "gradients of 2.bias, 2.weight, 0.bias, 0.weight"): 1}
    updates = {r.op for r in program.steps[-1] if r.phase == "update"}
    assert updates == {"broadcast"} and all(r.moves == "parameter" for r in program.steps[-1] if r.phase == "update")
    assert "broadcast" in program.segments["set-up"].counts()


def test_what_parallelize_module_scatters_is_set_up(programs: dict[str, Program]) -> None:
    program = programs["tensor_parallel"]
    assert {r.axis for r in program} == {"tp"}
    assert set(program.segments["set-up"].counts()) <= {"scatter", "broadcast"}
    assert [(r.phase, r.op) for r in program.steps[-1]] == [("forward", "all_reduce")]


def test_fsdp2s_units_are_named_in_both_passes(programs: dict[str, Program]) -> None:
    assert told(programs["fsdp2"].steps[-1]) == {
        **{("forward", "all_gather", unit): 1 for unit in ("0", "2")},
        **{("backward", "all_gather", unit): 1 for unit in ("0", "2")},
        **{("backward", "reduce_scatter", f"gradients of {unit}"): 1 for unit in ("0", "2")},
    }


def test_fsdp2s_buckets_have_the_parameters_as_parts(programs: dict[str, Program]) -> None:
    sizes = {
        "0": (("0.weight", (8, 4), 128), ("0.bias", (8,), 32)),
        "2": (("2.weight", (4, 8), 128), ("2.bias", (4,), 16)),
    }
    for record in programs["fsdp2"].steps[-1]:
        unit = (record.detail or "").removeprefix("gradients of ")
        told = [(part.detail, part.shape, part.bytes, part.moves) for part in record.parts]
        prefix, moves = ("", "parameter") if record.op == "all_gather" else ("gradient of ", "gradient")
        assert told == [(f"{prefix}{name}", shape, size, moves) for name, shape, size in sizes[unit]]
        assert record.payload_bytes == sum(part.bytes for part in record.parts)


def test_what_stages_ask_of_each_other_first_is_set_up(programs: dict[str, Program]) -> None:
    program = programs["pipeline"]
    assert all(part.counts() == {"collective_permute": 4} for part in program.steps)
    assert [r.phase for r in program.steps[-1]] == ["forward", "backward"] or told(program.steps[-1])


def unseen_threads(device: torch.device) -> list[tuple[str, str | None]]:
    """On each rank: calls from a thread, from a Future's callback in C++, and from compiled code."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def double(x: Tensor) -> Tensor:
        return functional.all_reduce(x * 2, "sum", [0, 1]) + 1

    def again(future: Any) -> Any:
        return started(dist.all_reduce(torch.ones(3), async_op=True)).get_future()

    with capture() as calls:
        for run in (partial(dist.all_reduce, torch.ones(1)), lambda: double(torch.ones(2))):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        started(dist.all_reduce(torch.ones(5), async_op=True)).get_future().then(again).wait()
        dist.barrier()
    return [(call.op, str(call.payload_bytes)) for call in calls if call.op == "all_reduce"]


def test_calls_from_every_thread_are_seen(pool: Workers) -> None:
    expected = [("all_reduce", str(4 * n)) for n in (1, 2, 5, 3)]
    assert pool.call(unseen_threads, world_size=2) == [expected, expected]
