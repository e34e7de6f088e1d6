"""What strategies and torch's own libraries send is traced, to the byte and with its phase; tracing changes nothing."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from contract import cost
from contract.axes import AXES, CORE, STRATEGIES, one_axis
from contract.problem import Problem
from contract.strategy import Run
from shardiff.ranks.supervisor import Workers
from shardiff.record import Record, totals
from shardiff.tracing.calls import Call
from shardiff.tracing.merge import merge
from shardiff.tracing.tracer import capture, trace
from shared_tests import on_ranks
from torch_impl.mesh import make_mesh, of_device_mesh

ZERO = tuple(strategy for strategy in STRATEGIES if strategy not in CORE)
SMALL = Problem(batch=16, width=16, layers=8)
RUNS = [Run("torch", one_axis(strategy, n), SMALL, device="cpu") for strategy in CORE for n in (2, 4, 8)]
RUNS += [Run("torch", one_axis("data_parallel", n), SMALL, overlap=False, device="cpu") for n in (2, 4, 8)]
RUNS += [Run("torch", one_axis(s, n), SMALL, overlap=False, device="cpu") for s in ZERO for n in (2, 8)]
RUNS += [
    Run("torch", one_axis("pipeline_parallel", n), SMALL, microbatches=m, device="cpu")
    for n, m in ((2, 1), (2, 4), (4, 1), (4, 3), (4, 6), (8, 2))
]
RUNS += [
    Run("torch", one_axis("tensor_parallel", 2), Problem(16, 16, 4, dtype=dtype), device="cpu")
    for dtype in ("float64", "bfloat16")
]


@pytest.fixture(scope="module")
def traced_runs(pool: Workers) -> dict[Run, list[Record]]:
    return on_ranks.traced(RUNS, pool)


def written(run: Run) -> str:
    return f"torch_impl/explicit/{run.strategy}.py"


def run_id(run: Run) -> str:
    extra = f"-m{run.microbatches}" if run.strategy == "pipeline_parallel" else "" if run.overlap else "-naive"
    return f"{run.strategy}-{run.world_size}{extra}-{run.problem.dtype}"


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_what_a_strategy_sends_is_what_its_closed_form_says(run: Run, traced_runs: dict[Run, list[Record]]) -> None:
    traced, predicted = traced_runs[run], cost.communication(run)
    sums, expected = totals(traced), totals(predicted)
    assert (sums["payload_bytes"], sums["wire_bytes"]) == (expected["payload_bytes"], expected["wire_bytes"])
    assert {r.axis for r in traced} == {AXES[run.strategy]}
    assert {r.source and r.source.partition(":")[0] for r in traced if r.phase == "forward"} <= {written(run)}
    assert {r.source and r.source.partition(":")[0] for r in traced if r.phase == "backward"} <= {
        written(run),
        "torch_impl/buckets.py",
        "torch_impl/compose.py",
        "torch_impl/gather_again.py",
    }  # whose backward() runs the other halves
    if run.strategy == "data_parallel" and run.overlap:  # gradients in buckets, and the loss in one of them
        assert {r.phase for r in traced} == {"backward"}
        assert {(r.op, r.dtype, r.groups) for r in traced} == {(r.op, r.dtype, r.groups) for r in predicted}
        return
    for phase in ("forward", "backward", "update"):
        got, want = ([r for r in records if r.phase == phase] for records in (traced, predicted))
        assert [comparable(r) for r in got] == [comparable(r) for r in want]


def comparable(r: Record) -> tuple[Any, ...]:
    edges = r.edges and tuple(sorted(r.edges))
    return r.op, r.dtype, r.payload_bytes, r.wire_bytes, r.group_size, r.groups, edges, r.executions


def test_gradients_are_named(traced_runs: dict[Run, list[Record]]) -> None:
    traced = traced_runs[Run("torch", one_axis("data_parallel", 2), SMALL, overlap=False, device="cpu")]
    names = [f"gradient of {kind}{layer}" for layer in reversed(range(8)) for kind in "bw"]
    assert [r.detail for r in traced if r.phase == "backward"] == names


def trace_library(device: torch.device, name: str) -> list[Call]:
    """A training step of a library's user, after two that are not traced: DDP arranges its buckets in the second."""
    own = {"mesh": mesh_2d, "accumulation": accumulation, "compile": compiled}
    step = own[name] if name in own else library_step(device, *name.split())
    step()
    step()
    with capture() as calls:
        step()
    return calls


def library_step(device: torch.device, maker: str, strategy: str, schedule: str = "gpipe") -> Callable[[], Any]:
    """A step of a peer in `benchmarks.steps`: 2 ranks, 16 samples, 4 layers of 16 x 16."""
    peers = importlib.import_module(f"benchmarks.steps.{'peers_sharded' if maker == 'fsdp2' else 'peers'}")
    train = importlib.import_module("torch_impl.train")
    run = Run("torch", one_axis(strategy, 2), Problem(16, 16, 4), schedule=schedule, device="cpu")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(AXES[strategy] or "",))
    step, model = getattr(peers, maker)(mesh, run, device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = train.make_batch(of_device_mesh(mesh, run), run, 0, device)

    def all_of_it() -> None:
        step(batch)
        optimizer.step()
        optimizer.zero_grad()

    return all_of_it


def mesh_2d() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    dist.all_reduce(torch.ones(4), group=mesh.get_group("dp"))
    dist.all_reduce(torch.ones(2), group=mesh.get_group("tp"))


def accumulation() -> None:
    """Two forward and backward passes, then an all_reduce of the gradient, an update, a broadcast within it."""
    w = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.1)

    def within(*_: Any) -> None:
        dist.broadcast(w.data, 0)

    optimizer.register_step_post_hook(within)
    for _ in range(2):
        share = (w * 2).sum()
        dist.all_reduce(share.detach())
        share.backward()
        share.item()
    dist.all_reduce(w.grad)
    optimizer.step()


def compiled() -> None:
    """A functional collective in compiled code."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def double(x: Tensor) -> Tensor:
        return functional.all_reduce(x * 2, "sum", [0, 1]) + 1

    double(torch.ones(4))


LIBRARIES: dict[str, dict[str, list[tuple[str, int, int]]]] = {  # phase -> op, payload bytes, times
    # All gradients, 4 x (16 x 16 + 16) float32, in one bucket by the C++ reducer; then the loss.
    "distributed_data_parallel data_parallel": {"backward": [("all_reduce", 4352, 1), ("all_reduce", 4, 1)]},
    # Every layer gathered for its forward pass, and for its backward pass again.
    "fsdp2 data_parallel": {
        "forward": [("all_gather", 1088, 4)],
        "backward": [("all_gather", 1088, 4), ("reduce_scatter", 1088, 4), ("all_reduce", 4, 1)],
    },
    "dtensor tensor_parallel": {
        "forward": [("all_gather", 1024, 3)],
        "backward": [("reduce_scatter", 1024, 3), ("all_reduce", 4, 1)],
    },
    "dtensor megatron_tensor_parallel": {"forward": [("all_reduce", 1024, 2)], "backward": [("all_reduce", 1024, 1)]},
    "pipelining pipeline_parallel": {
        "forward": [("collective_permute", 256, 4)],
        "backward": [("collective_permute", 256, 4), ("all_reduce", 4, 1)],
    },
    "pipelining pipeline_parallel 1f1b": {
        "forward": [("collective_permute", 256, 4)],
        "backward": [("collective_permute", 256, 4), ("all_reduce", 4, 1)],
    },
    "mesh": {"forward": [("all_reduce", 16, 1), ("all_reduce", 8, 1)]},
    "accumulation": {
        "forward": [("all_reduce", 4, 2)],
        "backward": [("all_reduce", 16, 1)],
        "update": [("broadcast", 16, 1)],
    },
    "compile": {"forward": [("all_reduce", 16, 1)]},
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_a_library_sends_is_seen_with_its_phase(name: str, pool: Workers) -> None:
    ranks = pool.call(trace_library, name, world_size=2)
    times = Counter((r.phase, r.op, r.payload_bytes) for r in merge(ranks))
    seen: dict[str, list[tuple[str, int, int]]] = {}
    for (phase, op, size), n in times.items():
        seen.setdefault(phase, []).append((op, size, n))
    assert seen == LIBRARIES[name]
    if name == "mesh":
        # torch makes no group for an axis that is the whole world: its name is the mesh's all the same
        assert [(r.axis, r.groups) for r in merge(ranks)] == [("dp", ((0, 1),)), ("tp", ((0,), (1,)))]
    if name.startswith("fsdp2"):
        details = [r.detail for r in merge(ranks) if r.phase == "forward"]
        assert details == [f"layers.{i}" for i in range(4)]


def trace_twice(device: torch.device) -> dict[str, Any]:
    """What tracing leaves unchanged, and what it records in unusual cases."""
    before = dist.Work.wait, dist.ProcessGroup._end_coalescing
    found: dict[str, Any] = {}
    world: Any = dist.group.WORLD
    w = torch.randn(8, 8, requires_grad=True)

    def step() -> Tensor:
        loss = functional.all_gather_tensor_autograd(torch.ones(4, 8) @ w, 0, world).square().sum()
        [grad] = torch.autograd.grad(loss, w)
        dist.all_reduce(grad)
        return grad

    plain = step()
    with trace() as outer:
        with trace({"w": w}) as inner:
            traced = step()
        w.grad = traced
        with pytest.raises(ZeroDivisionError), trace({"w": w}) as failing:
            dist.broadcast(w.grad[2:], 0)
            raise ZeroDivisionError
    found["equal"] = torch.equal(plain, traced)
    found["restored"] = before == (dist.Work.wait, dist.ProcessGroup._end_coalescing)
    found["inner"], found["outer"] = [r.op for r in inner], [r.op for r in outer]
    found["failing"] = [(r.op, r.detail) for r in failing]
    step()
    found["after"] = len(outer)
    return found


def test_tracing_nests_passes_exceptions_on_and_changes_nothing(pool: Workers) -> None:
    ops = ["all_gather", "reduce_scatter", "all_reduce"]
    for found in pool.call(trace_twice, world_size=2):
        assert found == {
            "equal": True,
            "restored": True,
            "inner": ops,
            "outer": [*ops, "broadcast"],
            "failing": [("broadcast", "gradient of w")],
            "after": 4,
        }


def train_traced(device: torch.device, run: Run) -> list[Tensor]:
    """The gradients of a step, without and with tracing."""
    compose, train = (importlib.import_module(f"torch_impl.{name}") for name in ("compose", "train"))
    mesh = make_mesh(run, device)
    batch = train.make_batch(mesh, run, 0, device)
    grads = []
    for context in (nullcontext(), trace()):
        with context:
            _, layers = compose.loss_and_grads(train.make_params(mesh, run, device), batch, mesh, run)
        grads.append(torch.cat([g.flatten() for layer in layers for g in layer]))
    return grads


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_the_same_to_the_bit(strategy: str, pool: Workers) -> None:
    for plain, traced in pool.call(train_traced, Run("torch", one_axis(strategy, 2), SMALL), world_size=2):
        assert torch.equal(plain, traced)
