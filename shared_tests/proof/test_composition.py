"""Strategies compose: every pair on 4 ranks and the triple on 8 equal the reference and send what was predicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from contract import cost
from contract.axes import parse_axes
from contract.layout import layout
from contract.memory import memory
from contract.optimizer import OPTIMIZERS
from contract.problem import Problem
from contract.strategy import IMPLEMENTATIONS, Run
from jax_impl.compiled import compile_all
from shardiff import hlo
from shardiff.compiling.hardware import parse
from shared_tests import evidence
from shared_tests.evidence import each
from shared_tests.on_ranks import held, traced

SIZES = Problem(batch=12, width=8, layers=8, dtype="float64")
PAIRS = [
    parse_axes(mesh, strategies)
    for mesh, strategies in (
        ("dp=2,tp=2", ("megatron_tensor_parallel",)),
        ("dp=2,tp=2", ("tensor_parallel",)),
        ("dp=2,pp=2", ()),
        ("pp=2,tp=2", ("megatron_tensor_parallel",)),
        ("pp=2,tp=2", ("tensor_parallel",)),
        ("fsdp=2,tp=2", ("megatron_tensor_parallel",)),
        ("fsdp=2,tp=2", ("tensor_parallel",)),
        ("dp=2,fsdp=2", ()),
        ("pp=2,fsdp=2", ()),
        ("dp=2,fsdp=2", ("zero2",)),
        ("fsdp=2,tp=2", ("zero1", "megatron_tensor_parallel")),
    )
]
ZERO = [  # the rest of what zero1 and zero2 compose with, on torch ranks
    parse_axes(mesh, strategies)
    for mesh, strategies in (
        ("dp=2,fsdp=2", ("zero1",)),
        ("pp=2,fsdp=2", ("zero1",)),
        ("pp=2,fsdp=2", ("zero2",)),
        ("fsdp=2,tp=2", ("zero2", "tensor_parallel")),
    )
]
OTHER_ORDERS = [parse_axes("tp=2,dp=2"), parse_axes("pp=2,dp=2"), parse_axes("tp=2,pp=2", ("tensor_parallel",))]
OTHER_ORDERS += [parse_axes("tp=2,fsdp=2"), parse_axes("fsdp=2,dp=2")]
TRIPLES = [parse_axes("dp=2,pp=2,tp=2", (name,)) for name in ("megatron_tensor_parallel", "tensor_parallel")]
TRIPLES += [parse_axes("fsdp=2,pp=2,tp=2")]


def make(implementation: str, axes, **rest) -> Run:
    return Run(implementation, axes, **{"problem": SIZES, "microbatches": 3, "steps": 2, "device": "cpu", **rest})


RUNS = [make("torch", axes, optimizer=name) for axes in (*PAIRS, *TRIPLES) for name in OPTIMIZERS]
RUNS += [
    make("torch", axes)
    for axes in (*OTHER_ORDERS, *ZERO, parse_axes("dp=2,fsdp=2,tp=2"), parse_axes("dp=2,pp=2,fsdp=2"))
]
RUNS += [make("torch", axes, overlap=False) for axes in (*PAIRS, *TRIPLES) if axes[0].name in ("dp", "fsdp")]
IN_JAX = [
    make(side, axes, optimizer=OPTIMIZERS[(i + side_number) % 2], steps=1)
    for side_number, side in enumerate(IMPLEMENTATIONS[1:])
    for i, axes in enumerate((*PAIRS, *TRIPLES))
]
BY_TURNS = IN_JAX[1 : len(IN_JAX) // 2 : 2] + IN_JAX[len(IN_JAX) // 2 :: 2]  # compiled by `make long`, on either side
# What does not divide: shares of 6 and 5 samples in microbatches of 3 and 2 or less, stages of 3 and 2 layers or pairs.
UNEVEN = [
    make(side, axes, problem=replace(SIZES, batch=11, layers=layers), microbatches=2, steps=1)
    for side in IMPLEMENTATIONS
    for axes, layers in ((parse_axes("dp=2,pp=2"), 5), (parse_axes("pp=2,tp=2"), 6))
]


@each([*RUNS, *IN_JAX, *UNEVEN], BY_TURNS)
def test_composed_strategies_equal_the_reference(run, execute, reference_of):
    assert evidence.failures(run, execute(run), reference_of(run)) == []
    assert evidence.misplaced(run, execute(run)) == []


NAIVE = [make("torch", axes, overlap=False) for axes in (*PAIRS, *ZERO, *OTHER_ORDERS, *TRIPLES)]
BUCKETS = [make("torch", axes) for axes in (*PAIRS, *TRIPLES) if axes[0].name == "dp" and axes[1].name != "fsdp"]


@pytest.fixture(scope="module")
def traced_runs(pool):
    return traced([*NAIVE, *BUCKETS], pool)


@each(NAIVE)
def test_torch_sends_what_the_closed_form_says_record_by_record(run, traced_runs):
    assert evidence.told(traced_runs[run]) == evidence.told(cost.communication(run))


@each(BUCKETS)
def test_buckets_carry_the_gradients_and_the_loss_of_one_axis_once_a_step(run, traced_runs):
    traced, predicted = traced_runs[run], cost.communication(run)
    of_dp = [r for r in traced if r.axis == "dp"]
    assert {r.op for r in of_dp} == {"all_reduce"} and len(of_dp) < run.microbatches * 2
    assert sum(r.payload_bytes for r in of_dp) == sum(r.payload_bytes for r in predicted if r.axis == "dp")
    assert evidence.told([r for r in traced if r.axis != "dp"]) == evidence.told(
        [r for r in predicted if r.axis != "dp"]
    )


@pytest.mark.parametrize(
    "chosen", [slice(0, None, 3), *(pytest.param(slice(i, None, 3), marks=pytest.mark.long) for i in (1, 2))]
)
def test_shard_map_compiles_to_the_predicted_bytes_of_each_axis_exactly(chosen):
    runs = [make("shard_map", axes) for axes in (*PAIRS, *TRIPLES)[chosen]]
    runs = [replace(run, reshard=False) if "fsdp" in run.mesh.names else run for run in runs]  # see the diff: kept
    for run, compiled in zip(runs, compile_all([(run, parse(f"cpu:{run.world_size}")) for run in runs]), strict=True):
        found, want = Counter(), Counter()
        for sums, records in (
            (found, run.mesh.named(hlo.read(compiled.hlo).records)),
            (want, cost.communication(run)),
        ):
            for r in records:
                sums[r.op, r.phase, r.axis] += r.payload_bytes * (r.executions.max or 0)
        loss = {key: value for key, value in (found - want).items() if value <= 8}  # it may ride with the gradients
        assert {k: v for k, v in (found - want).items() if k not in loss} == {}, run.mesh
        assert sum(found.values()) == sum(want.values()), run.mesh


def test_a_rank_holds_the_parts_of_all_its_axes():
    run = make("torch", parse_axes("dp=2,pp=2,tp=2"))
    first, last = layout(run)[0], layout(run)[7]
    assert [part.layer for part in first] == [0, 1, 2, 3] and [part.layer for part in last] == [4, 5, 6, 7]
    assert first[0].cuts.w == (slice(None), slice(0, 4)) and last[1].cuts.w == (slice(4, 8), slice(None))
    assert layout(run)[0] == layout(run)[4], "replicas over dp"


@pytest.mark.parametrize(
    ("mesh", "strategies", "changes", "words"),
    [
        ("dp=2", ("tensor_parallel",), {}, "tensor_parallel needs the axis tp, which the mesh 'dp=2' does not have"),
        ("dp=2,xp=2", (), {}, "unknown axis 'xp' in the mesh 'dp=2,xp=2'; known: dp, fsdp, tp, pp"),
        ("dp=2,dp=2", (), {}, "axis dp is named twice"),
        ("dp=2,tp", (), {}, "a mesh is AXIS=RANKS for each axis, outermost first, such as dp=2,tp=4; got 'dp=2,tp'"),
        ("dp=0,tp=2", (), {}, "axis dp must have at least 1 rank, got 0"),
        ("dp=2,tp=2", ("magic",), {}, "unknown strategy 'magic' for a mesh; known: data_parallel, tensor_parallel, "),
        ("pp=4,tp=2", (), {}, "pipeline_parallel over 4 stages needs at least 4 pairs of layers, got 2"),
        ("dp=4,pp=2", (), {"microbatches": 3}, "3 microbatches need a batch of at least 3 on every rank, got 2"),
        ("dp=2,tp=3", (), {}, "megatron_tensor_parallel needs a width divisible by its degree: width 8, degree 3"),
    ],
)
def test_a_mesh_that_cannot_work_is_refused_in_one_line(mesh, strategies, changes, words):
    with pytest.raises(ValueError, match="^" + words.replace("(", r"\(")) as caught:
        Run("torch", parse_axes(mesh, strategies), Problem(8, 8, 4), **{"microbatches": 1, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("chosen", [PAIRS, TRIPLES], ids=["pairs", "triples"])
def test_a_rank_holds_what_the_closed_form_of_memory_says(chosen, pool):
    runs = [make("torch", axes) for axes in chosen]
    for rank, measured in enumerate(pool.call(held, runs, world_size=runs[0].world_size)):
        for run, (parameters, gradients, activations) in zip(runs, measured, strict=True):
            want = memory(run)[rank]
            assert parameters == want.parameters, (run.mesh, rank)
            with_loss = {"data_parallel", "zero1"} & set(run.strategies) and "zero2" not in run.strategies
            with_loss = with_loss and "fully_sharded" not in run.strategies  # the loss rides in a bucket
            assert gradients - want.gradients == (8 if with_loss else 0), (run.mesh, rank)
            assert activations == want.activations, (run.mesh, rank)
