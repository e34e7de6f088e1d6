"""Code that otherwise only a GPU runs: the few CUDA calls that it makes are replaced, so that mistakes show here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.documents.gpu import Reached
from benchmarks.documents.results_io import parse_as
from benchmarks.gpu import cuda, floors, programs, rates, sizes, steps_jax, steps_torch
from contract.problem import Problem
from shardiff.system import machine

BLOCK = replace(sizes.REHEARSAL.step_block, width=16, sequence=8, ff=32)
ON_GPU = replace(sizes.REHEARSAL, device="cuda", step=Problem(16, 16, 2), step_block=BLOCK, compiled=sizes.GPU.compiled)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls of torch.cuda, whose clock advances by a millisecond per event."""
    made: Counter[str] = Counter()
    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            nonlocal now
            now += 1.0
            self.at = now

        def elapsed_time(self, end: Event) -> float:
            assert made["synchronize"] >= 2  # else the last events may not have happened yet
            return end.at - self.at

    def counted(name: str, result: object = None):
        def call(*args: object) -> object:
            made[name] += 1
            return result

        return call

    properties = SimpleNamespace(name="NVIDIA H200", total_memory=2**37, multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 28, 9)))
    for name, result in (
        ("set_device", None),
        ("synchronize", None),
        ("empty_cache", None),
        ("reset_peak_memory_stats", None),
        ("max_memory_allocated", 12345),
        ("get_device_properties", properties),
    ):
        monkeypatch.setattr(torch.cuda, name, counted(name, result))
    return made


@pytest.fixture
def on_cpu(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The same, with the tensors of the first GPU on the CPU."""
    assert cuda.torch_device("cuda") == torch.device("cuda", 0)
    monkeypatch.setattr(cuda, "torch_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(cuda, "host_bytes", lambda device, size: torch.empty(size, dtype=torch.uint8))
    return calls


def test_time_on_a_gpu_is_that_between_events(calls):
    acts = []
    assert cuda.timed("cuda", lambda: acts.append(1), 3, 2) == pytest.approx([0.001] * 3)
    assert len(acts) == 5


def test_facts_of_a_gpu(calls, monkeypatch):
    asked = []
    monkeypatch.setattr(machine, "_output", lambda *command: asked.append(command) or "580.159.03\n580.159.03")
    facts = cuda.facts("cuda")
    assert facts["name"] == "NVIDIA H200" and facts["capability"] == "9.0"
    assert facts["driver_version"] == "580.159.03" and facts["nccl_of_torch"] == "2.28.9"
    assert asked == [("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")]
    assert cuda.facts("cpu") == {}


def test_steps_of_torch(on_cpu, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    kept: list[dict] = []
    steps_torch.measure(ON_GPU, kept.append)
    reached = parse_as(Reached, kept[-1])
    assert [(step.model, step.implementation, step.dtype) for step in reached.steps] == [
        (model, name, dtype)
        for model in ("MLP", "transformer")
        for name in ("eager", "compiled")
        for dtype in ("bfloat16", "float32")
    ]
    assert len(compiled) == 4 and len(reached.rates) == 2
    assert {step.peak_bytes for step in reached.steps} == {12345}
    assert all(step.step_seconds.median == pytest.approx(0.001) for step in reached.steps)
    assert on_cpu["reset_peak_memory_stats"] == 8


@pytest.mark.parametrize("problem", [ON_GPU.step, ON_GPU.step_block], ids=["MLP", "transformer"])
def test_eager_and_compiled_steps_have_the_same_gradients(problem, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    run = steps_torch.Run("torch", steps_torch.one_axis("single_device", 1), problem, device="cpu")
    params, batch = steps_torch.draw(problem, torch.device("cpu"))
    assert [[tuple(t.shape) for t in layer] for layer in params] == [list(layer) for layer in problem.shapes()]
    ours = [t.clone() for layer in steps_torch.eager(run)(params, batch) for t in layer]
    theirs = [t for layer in steps_torch.compiled(problem)(params, batch) for t in layer]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("problem", [ON_GPU.step, ON_GPU.step_block], ids=["MLP", "transformer"])
def test_the_operations_of_a_step_are_those_of_its_products(problem):
    from torch.utils.flop_counter import FlopCounterMode

    run = steps_torch.Run("torch", steps_torch.one_axis("single_device", 1), problem, device="cpu")
    params, batch = steps_torch.draw(problem, torch.device("cpu"))
    with FlopCounterMode(display=False) as counted:
        steps_torch.eager(run)(params, batch)
    assert counted.get_total_flops() == rates.flops_of_step(problem)
    assert rates.parameters(problem) == sum(t.numel() for layer in params for t in layer)


def test_copies(on_cpu):
    rows = list(floors.copies(ON_GPU))
    assert [row["op"] for row in rows] == ["copy", "host to device", "device to host"]
    assert rows[0]["bytes_per_second"] == pytest.approx(2 * rows[0]["bytes"] / 0.001)  # it reads and it writes
    assert rows[1]["bytes_per_second"] == pytest.approx(rows[1]["bytes"] / 0.001)


class Device:
    """A CPU device of jax with a GPU's memory statistics."""

    def memory_stats(self) -> dict[str, int]:
        return {"peak_bytes_in_use": 99}


@pytest.fixture
def jax_gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Replaces GPUs by jax's CPU devices; returns what was asked for."""
    import jax

    from shardiff.ranks import jax_devices

    asked: list[tuple[int, str]] = []
    monkeypatch.setattr(jax_devices, "prepare", lambda count, device: asked.append((count, device)))
    monkeypatch.setattr(jax_devices, "devices", lambda count, device: jax.devices("cpu")[:count])
    monkeypatch.setattr(steps_jax, "prepare", jax_devices.prepare)
    monkeypatch.setattr(steps_jax, "devices", jax_devices.devices)
    return asked


def test_steps_of_jax(jax_gpus):
    kept: list[dict] = []
    steps_jax.measure(ON_GPU, kept.append)
    reached = parse_as(Reached, kept[-1])
    assert [(step.model, step.implementation, step.dtype) for step in reached.steps] == [
        (model, name, dtype)
        for model, name in (("MLP", "annotated"), ("MLP", "shard_map"), ("transformer", "annotated"))
        for dtype in ("bfloat16", "float32")
    ]
    assert all(
        step.flops_per_second > 0 and step.sequence == (8 if step.model != "MLP" else 1) for step in reached.steps
    )
    assert jax_gpus == [(1, "cuda")]
    assert cuda.jax_peak_bytes(Device()) == 99


def test_one_rank_of_many_mocks_the_others_before_jax_starts(jax_gpus, monkeypatch):
    from jax_impl import jax_versions

    monkeypatch.setattr(jax_versions, "mock_hosts", lambda count: jax_gpus.append((count, "mocked")))
    monkeypatch.setattr(programs, "has_compiler", lambda kind: False)  # for which it would compile as long again
    monkeypatch.setattr(programs, "mocked", lambda ranks: sizes.mocked(ranks)[:1])
    kept: list[dict] = []
    programs.one_of_many(ON_GPU, kept.append)
    reached = parse_as(Reached, kept[-1])
    assert jax_gpus == [(2, "mocked"), (2, "cuda")]
    (program,), (rank,) = reached.programs, reached.ranks
    assert program.target == "cpu:2" and program.differences == []
    assert program.wire_bytes[0] == program.wire_bytes[1] and program.wire_bytes[0]
    assert rank.ranks == 2 and rank.mesh == "dp=2"


def test_jax_has_the_mock_topology():
    import jax

    from jax_impl.jax_versions import mock_hosts

    try:
        mock_hosts(8)
    finally:
        jax.config.update("jax_mock_gpu_topology", "")


def test_programs_that_differ_are_said_to():
    from contract.axes import one_axis
    from contract.cost import communication
    from contract.problem import Problem
    from contract.strategy import Run

    records = communication(Run("torch", one_axis("data_parallel", 4), Problem(8, 16, 2)))
    assert programs.differences(records, records) == []
    (line, *_) = programs.differences(records, records[1:])
    assert line.startswith("all_reduce of ") and line.endswith(" for the target")
