"""Targets: what a name means, and that what is compiled for one is the training step, whatever hardware is here."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from typing import Any

import jax
import pytest

from contract.axes import AXES, STRATEGIES, one_axis
from contract.problem import Problem
from contract.strategy import Run
from jax_impl import train
from jax_impl.compiled import Compiled, compile, compile_all
from jax_impl.mesh import make_mesh
from jax_impl.specs import abstract
from jax_impl.updates import state_shardings
from shardiff import hlo
from shardiff.compiling import devices as target_devices
from shardiff.compiling.hardware import FAMILIES, has_compiler, known, parse
from shardiff.ranks.jax_devices import devices

IMPLEMENTATIONS = ("shard_map", "annotated")
TINY = Problem(batch=8, width=16, layers=8)
SIZES = {
    "cpu:8": 8,
    "a100:8": 8,
    "h100:1": 1,
    "h100:8": 8,
    "h200:2x8": 16,
    "b200:1x72": 72,
    "v2:2x2": 8,
    "v3:2x2": 8,
    "v4:2x2x1": 4,
    "v5e:2x4": 8,
    "v5e:16x16": 256,
    "v5p:2x2x2": 8,
    "v5p:8x8x16": 1024,
    "v6e:6x2": 12,
    "tpu7x:2x2x1": 8,
}
REFUSED = {
    "": "unknown target ''; known: cpu, a100, h100, h200, b200, v2, v3, v4, v5e, v5p, v6e, tpu7x",
    "v7x:2x2x1": "unknown target 'v7x'; known: cpu",
    "H100:8": "unknown target 'H100'",
    "h100": "needs a size, such as h100:8 or h100:2x8",
    "h100:": "needs a size",
    "h100:eight": "needs a size",
    "h100:8x": "needs a size",
    "h100: 8": "needs a size",
    "h100:-8": "needs a size",
    "h100:8\n": "needs a size",
    "h100:\u0668": "needs a size",
    "h100:1x2x8": "a size of h100 has 1 or 2 numbers, 'h100:1x2x8' has 3; such as h100:8",
    "cpu:2x4": "a size of cpu has 1 numbers, 'cpu:2x4' has 2; such as cpu:8",
    "v5e:8": "a size of v5e has 2 numbers, 'v5e:8' has 1; such as v5e:2x4",
    "v5p:2x2": "a size of v5p has 3 numbers, 'v5p:2x2' has 2; such as v5p:2x2x2",
    "cpu:0": "at least 1, got 'cpu:0'; such as cpu:8",
    "h100:2x0": "at least 1, got 'h100:2x0'",
    "v5e:0x4": "at least 1, got 'v5e:0x4'",
    "v5e:1x1": "must be even: v5e:2x2, not v5e:1x1",
    "v6e:3x6": "must be even: v6e:4x6, not v6e:3x6",
    "tpu7x:1x1x4": "must be even: tpu7x:2x2x4, not tpu7x:1x1x4",
    "cpu:5000": "cpu:5000 has 5000 devices, cpu at most 1024",
    "v5p:64x64x64": "v5p:64x64x64 has 262144 devices, v5p at most 32768",
}


def needs(*names: str) -> None:
    """Skip where a target's compiler is not installed."""
    for target in map(parse, names):
        if not has_compiler(target.kind):
            pytest.skip(f"no compiler for {target} here: pip install 'shardiff[compilers]'")


def found(compiled: Compiled) -> Counter[tuple[str, str, str, int]]:
    """(phase, op, dtype, payload) of every collective, with its executions."""
    count: Counter[tuple[str, str, str, int]] = Counter()
    for r in hlo.read(compiled.hlo).records:
        assert r.executions.max is not None
        count[r.phase, r.op, r.dtype, r.payload_bytes] += r.executions.max
    return count


def instructions(text: str) -> list[str]:
    """The lines of HLO text that are instructions, without the Python files and lines that they come from."""
    lines = [re.sub(r", metadata=\{[^}]*\}", "", line) for line in text.splitlines() if " = " in line]
    assert len(lines) > 50
    return lines


@pytest.mark.parametrize(("text", "num_devices"), SIZES.items())
def test_a_size_is_so_many_devices_and_prints_as_it_was_written(text, num_devices):
    target = parse(text)
    assert (target.num_devices, str(target), target.kind) == (num_devices, text, FAMILIES[target.name].kind)


@pytest.mark.parametrize(("text", "words"), REFUSED.items())
def test_a_wrong_target_is_refused_in_one_line_that_says_what_would_be_right(text, words):
    with pytest.raises(ValueError) as refusal:
        parse(text)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_parsing_and_listing_targets_import_no_framework():
    code = "import sys; from shardiff.compiling.hardware import known, parse; parse('v5e:2x4'); known(); "
    code += "assert not {'jax', 'jaxlib', 'flax', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_known_lists_every_family_with_examples_that_parse():
    rows = known()
    assert [row.name for row in rows] == list(FAMILIES)
    for row in rows:
        assert row.compiler == has_compiler(row.family.kind)
        assert {parse(example).name for example in row.family.examples} == {row.name}
        assert (row.attached is None) == (row.family.kind == "tpu")
        assert (row.family.memory > 0 and bool(row.family.source)) == (row.family.kind != "cpu")


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.kind == "gpu"])
def test_the_description_of_a_gpu_agrees_with_its_datasheet(name):
    config = (target_devices.CONFIGS / f"{name}.txtpb").read_text()
    family = FAMILIES[name]
    for field, value in (("device_memory_size", family.memory), ("memory_bandwidth", family.memory_bandwidth)):
        described = re.search(rf"^  {field}: (\d+)$", config, re.M)
        assert described and float(described[1]) == pytest.approx(value, rel=0.02)


@pytest.mark.parametrize("strategy", AXES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_shapes_compiled_for_are_those_of_the_arrays_trained_on(implementation, strategy):
    # a batch that has to be padded, and stages that differ in length
    problem = Problem(batch=6, width=8, layers=6, dtype="bfloat16")
    run = Run(implementation, one_axis(strategy, 1 if strategy == "single_device" else 4), problem)
    mesh = make_mesh(run, devices(run.world_size, "cpu"))
    placed = train.make_params(mesh, run), train.make_batch(mesh, run, 0)
    shapes = abstract(mesh, run)
    assert jax.tree.structure(shapes) == jax.tree.structure(placed)
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(placed), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)


@pytest.mark.parametrize(
    ("implementation", "strategy"),
    [
        pytest.param(implementation, strategy, marks=[pytest.mark.long] if (i + j) % 2 else [])
        for i, implementation in enumerate(IMPLEMENTATIONS)
        for j, strategy in enumerate(STRATEGIES)
    ],
)
def test_the_whole_step_compiles_to_the_program_that_trains(implementation, strategy):
    problem = Problem(batch=8, width=16, layers=4 if strategy == "pipeline_parallel" else 2)
    run = Run(implementation, one_axis(strategy, 4), problem)
    compiled = compile(run, parse("cpu:4"), "highest", update=True)
    mesh, optimizer = make_mesh(run, devices(4, "cpu")), train.make_optimizer(run)
    with jax.default_matmul_precision("highest"):
        params, batch = train.make_params(mesh, run), train.make_batch(mesh, run, 0)
        step: Any = train.compile_step(mesh, run, optimizer, params, with_grads=False)
        state = jax.jit(optimizer.init, out_shardings=state_shardings(optimizer, params, mesh, run))(params)
        trained = step.lower(params, state, batch).compile()
    assert instructions(compiled.hlo) == instructions(trained.as_text())
    assert compiled.memory.aliased > 0  # what is replaced is given back


@pytest.mark.long  # test_diff.py has them compiled, too
def test_every_family_compiles_one_after_another_in_one_process():
    names = [text for text, n in SIZES.items() if n <= 72 and has_compiler(parse(text).kind)]
    jobs = [
        (Run("annotated", one_axis("data_parallel", parse(t).num_devices), Problem(72, 16, 2)), parse(t)) for t in names
    ]
    for (run, target), compiled in zip(jobs, compile_all(jobs), strict=True):
        assert compiled.target == target
        records = hlo.read(compiled.hlo).records
        assert {r.op for r in records} == ({"all_reduce"} if run.world_size > 1 else set())
        assert sum(r.payload_bytes for r in records) == (4 * (2 * (16 * 16 + 16) + 1) if run.world_size > 1 else 0)
        assert all(r.groups == (tuple(range(run.world_size)),) for r in records)
        assert compiled.memory.arguments > 0 and compiled.seconds > 0
    needs(*SIZES)  # those that are not here are skipped, not forgotten


def test_memory_is_what_a_device_holds():
    needs("h100:8")
    run = Run("shard_map", one_axis("tensor_parallel", 8), Problem(256, 1024, 4))
    params = 4 * (1024 * 1024 + 1024) // 8
    for compiled in compile_all([(run, parse("cpu:8")), (run, parse("h100:8"))]):
        assert compiled.memory.arguments == 4 * (params + 256 * 1024 + 256 * 1024 // 8 + 256)
        assert 4 * (params + 1) <= compiled.memory.outputs < 4 * (params + 1) + 128
        assert compiled.memory.temporaries > 0 and compiled.memory.aliased == 0


def test_a_slice_of_1024_chips_costs_no_more_than_its_program():
    needs("v5p:8x8x16")
    compiled = compile(Run("annotated", one_axis("data_parallel", 1024), Problem(1024, 64, 2)), parse("v5p:8x8x16"))
    assert found(compiled) == {("backward", "all_reduce", "float32", 4 * (2 * (64 * 64 + 64) + 1)): 1}
    assert {r.group_size for r in hlo.read(compiled.hlo).records} == {1024}


def test_float64_and_bfloat16_are_compiled_as_such():
    jobs = [
        (Run("shard_map", one_axis("tensor_parallel", 8), Problem(8, 16, 2, t)), parse("cpu:8"))
        for t in ("float64", "bfloat16")
    ]
    double, half = compile_all(jobs)
    assert "f64[8,16]" in double.hlo and "bf16[8,16]" in half.hlo
    assert "f64[" not in half.hlo


def test_some_of_the_devices_do_if_they_make_a_slice(capfd):
    needs("h100:8", "v5e:2x4")
    run = Run("annotated", one_axis("data_parallel", 4), TINY)
    for compiled in compile_all([(run, parse(t)) for t in ("cpu:8", "h100:8", "v5e:2x4")]):
        assert {r.group_size for r in hlo.read(compiled.hlo).records} == {4}
    with pytest.raises(ValueError, match="^3 of the 8 devices of v5e:2x4 make no slice: [^\n]*$"):
        compile(Run("annotated", one_axis("data_parallel", 3), TINY), parse("v5e:2x4"))
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_compiled_is_refused_in_one_line(capfd, monkeypatch):
    run, large = (
        Run("annotated", one_axis("data_parallel", 8), TINY),
        Run("annotated", one_axis("data_parallel", 8), Problem(8, 65536, 4)),
    )
    for job, precision, words in (
        ((run, parse("cpu:4")), "default", "^8 ranks need 8 devices, cpu:4 has 4$"),
        (
            (Run("torch", one_axis("data_parallel", 4), TINY), parse("cpu:4")),
            "default",
            "^torch is traced, not compiled; [^\n]*$",
        ),
        ((run, parse("cpu:8")), "low", "^unknown precision 'low'; known: default, highest$"),
    ):
        with pytest.raises(ValueError, match=words):
            compile(*job, precision)
    if has_compiler("tpu"):  # 64 GiB of parameters
        with pytest.raises(ValueError, match="^the compiler for v5e:2x4 refuses data_parallel on 8 devices: [^\n]*HBM"):
            compile(large, parse("v5e:2x4"))
    monkeypatch.setattr(target_devices, "has_compiler", lambda kind: kind == "cpu")
    for text in ("h100:8", "v5e:2x4"):
        with pytest.raises(ValueError, match=rf'^{text} needs .* not installed: pip install "shardiff\[compilers\]"$'):
            compile(run, parse(text))
    assert capfd.readouterr() == ("", "")


def test_nothing_that_compilers_log_reaches_the_screen():
    code = """
from contract.problem import Problem
from contract.axes import one_axis
from contract.strategy import Run
from jax_impl.compiled import compile
from shardiff.compiling.hardware import has_compiler, parse
for text in ("v5e:2x4", "h100:8", "cpu:8"):
    if has_compiler(parse(text).kind):
        print(compile(Run("annotated", one_axis("tensor_parallel", 8), Problem(8, 16, 2)), parse(text)).target)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [text for text in ("v5e:2x4", "h100:8", "cpu:8") if has_compiler(parse(text).kind)]
