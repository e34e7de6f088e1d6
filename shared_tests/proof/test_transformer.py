"""Every strategy of a transformer, and their compositions, equal the one reference on all sides, number by number."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest

from contract import cost
from contract.axes import ALL_AXES, ON_AXES, Axes, Axis, parse_axes
from contract.optimizer import OPTIMIZERS
from contract.strategy import Run
from contract.transformer import Transformer
from shared_tests import evidence
from shared_tests.on_ranks import traced
from shared_tests.padded import Padded

MLP = Transformer(batch=4, width=16, layers=2, dtype="float64", sequence=8, heads=4, ff=24)
MOE = replace(MLP, experts=4)  # of a capacity that drops some tokens
UNEVEN = replace(MLP, batch=5)  # and 2 microbatches, of 3 samples and 2
STRATEGIES = tuple(name for name in ON_AXES if name != "tensor_parallel")  # which is the MLP's
IN_ORDER = ("dp", "fsdp", "pp", "ep", "cp", "tp")  # of axes, outermost first


def make(side: str, axes: Axes, problem: Transformer, **rest) -> Run:
    return Run(side, axes, problem, **{"steps": 2, "microbatches": 2, "device": "cpu", **rest})


def named(mesh: str, *strategies: str) -> Axes:
    return parse_axes(mesh, strategies)


def problem_of(*strategies: str) -> Transformer:
    """A problem that shows most of these strategies: experts where the sequence is whole, an uneven batch without."""
    axes = {ALL_AXES[name] for name in strategies}
    if "cp" not in axes:
        return MOE
    return MLP if "pp" in axes else UNEVEN  # of uneven microbatches a trace cannot tell which rings turn at once


def composed(*strategies: str) -> Axes:
    """The strategies, each on 2 ranks."""
    axes = [Axis(ALL_AXES[name], 2, name) for name in strategies]
    return tuple(sorted(axes, key=lambda axis: IN_ORDER.index(axis.name)))


def refused(axes: Axes, problem: Transformer) -> bool:
    try:
        make("torch", axes, problem)
    except ValueError:
        return True
    return False


def in_id(run: Run) -> str:
    """A run as the id of a test."""
    changed = {"B": run.problem.batch, "E": run.problem.experts, "m": run.microbatches}
    told = [f"{key}{value}" for key, value in changed.items()] + [run.schedule] * (run.schedule != "gpipe")
    told += ["naive"] * (not run.overlap) + ["kept"] * (run.reshard is False)
    return "-".join([run.implementation, run.strategy, str(run.mesh), run.problem.dtype, run.optimizer, *told])


each = partial(evidence.each, ids=in_id)

ALONE = [(composed(name), problem_of(name)) for name in STRATEGIES]
ALONE += [(composed(name), UNEVEN) for name in ("data_parallel", "fully_sharded", "zero1", "zero2")]
ALONE += [(composed("pipeline_parallel"), UNEVEN)]
ALONE += [(composed(name), MLP) for name in ("megatron_tensor_parallel", "sequence_parallel")]
DEGREES = [(named("cp=4", "ring_attention"), MLP)]  # of pieces of one token
MORE_DEGREES = [(named("cp=4", name), MLP) for name in ("context_parallel", "ulysses")]
MORE_DEGREES += [(named("tp=4", name), MOE) for name in ("megatron_tensor_parallel", "sequence_parallel")]
MORE_DEGREES += [
    (named("ep=4"), MOE),
    (named("fsdp=4"), MOE),
    (named("cp=3", "ring_attention"), replace(MLP, sequence=12)),
]
PAIRS = [
    (composed(*pair), replace(problem_of(*pair), layers=2 if "pipeline_parallel" in pair else 1))
    for pair in combinations(STRATEGIES, 2)
    if ALL_AXES[pair[0]] != ALL_AXES[pair[1]] and not refused(composed(*pair), problem_of(*pair))
]
TRIPLES = [
    (axes, problem)
    for axes, problem in (
        (named("dp=2,pp=2,tp=2"), MOE),
        (named("fsdp=2,pp=2,tp=2", "sequence_parallel"), UNEVEN),
        (named("dp=2,cp=2,tp=2"), MLP),
        (named("fsdp=2,cp=2,tp=2", "ulysses"), MLP),
        (named("dp=2,ep=2,tp=2"), MOE),
        (named("dp=2,fsdp=2,ep=2"), replace(MOE, batch=8)),
        (named("pp=2,cp=2,tp=2", "ring_attention"), MLP),
    )
]
OTHER_ORDERS = [(named("tp=2,fsdp=2"), MOE), (named("tp=2,cp=2"), UNEVEN), (named("tp=2,ep=2"), MOE)]
OTHER_ORDERS += [(named("ep=2,dp=2"), MOE), (named("cp=2,pp=2", "context_parallel"), UNEVEN)]
EVERY = [*ALONE, *DEGREES, *MORE_DEGREES, *PAIRS, *TRIPLES, *OTHER_ORDERS]

IN_TORCH = [make("torch", *case, optimizer=OPTIMIZERS[i % 2]) for i, case in enumerate(EVERY)]
IN_TORCH = [run if len(run.axes) == 1 else replace(run, steps=1) for run in IN_TORCH]
NAIVE = [replace(run, overlap=False, steps=1) for run in IN_TORCH]
KEPT = [replace(run, reshard=False) for run in IN_TORCH if "fully_sharded" in run.strategies and len(run.axes) == 1]
SCHEDULED = [
    make("torch", axes, problem, schedule=schedule, microbatches=microbatches)
    for axes, problem, schedule, microbatches in (
        (named("pp=2"), replace(UNEVEN, layers=3), "1f1b", 3),
        (named("pp=2"), MOE, "zb_h1", 4),
        (named("pp=2"), replace(MOE, layers=4), "zb_v", 2),
        (named("pp=2"), replace(UNEVEN, layers=4), "interleaved", 2),
        (named("pp=2,tp=2", "sequence_parallel"), MLP, "zb_h1", 2),
        (named("pp=2,cp=2", "ring_attention"), MLP, "1f1b", 2),
        (named("pp=2,ep=2"), MOE, "1f1b", 2),
    )
]


@each([*IN_TORCH, *NAIVE[::6], *KEPT, *SCHEDULED])
def test_in_torch_every_strategy_and_every_pair_equals_the_reference(run, execute, reference_of):
    assert evidence.failures(run, execute(run), reference_of(run)) == []


# JAX compiles every run, so on each side every strategy is in one of these at least: alone, or in a pair or more.
COVERING = [  # side, mesh, strategies, problem, what else
    ("shard_map", "dp=2", (), UNEVEN, {}),
    ("shard_map", "fsdp=2", ("zero1",), MOE, {}),
    ("shard_map", "fsdp=2", ("zero2",), MOE, {}),
    ("shard_map", "cp=2", ("context_parallel",), MLP, {}),
    ("shard_map", "cp=4", ("ring_attention",), MLP, {}),
    ("shard_map", "cp=2", ("ulysses",), MLP, {}),
    ("shard_map", "fsdp=2,tp=2", ("sequence_parallel",), MOE, {}),
    ("shard_map", "cp=2,tp=2", ("ring_attention",), UNEVEN, {}),
    ("shard_map", "fsdp=2,cp=2", ("ring_attention",), UNEVEN, {}),
    ("shard_map", "fsdp=2,ep=2", (), MOE, {}),
    ("shard_map", "pp=2,ep=2", (), MOE, {}),
    ("shard_map", "pp=2", (), MLP, {"schedule": "1f1b"}),
    ("shard_map", "dp=2,pp=2,tp=2", (), MOE, {}),
    ("annotated", "fsdp=2", ("zero1",), MOE, {}),
    ("annotated", "fsdp=2", ("zero2",), MOE, {}),
    ("annotated", "fsdp=2", (), MOE, {"spelling": "naive"}),
    ("annotated", "tp=2", ("sequence_parallel",), UNEVEN, {}),
    ("annotated", "fsdp=2,tp=2", (), MOE, {}),
    ("annotated", "cp=2,tp=2", ("ulysses",), MLP, {}),
    ("annotated", "fsdp=2,cp=2", ("context_parallel",), UNEVEN, {}),
    ("annotated", "dp=2,ep=2", (), MOE, {}),
    ("annotated", "dp=2,pp=2,tp=2", (), MLP, {}),
]


def in_jax(side: str, axes: Axes, problem: Transformer, **rest) -> Run:
    layers = problem.layers if any(axis.name == "pp" for axis in axes) else 1
    return make(side, axes, replace(problem, layers=layers), **{"steps": 1, **rest})


COMPILED = [
    in_jax(side, named(mesh, *which), problem, optimizer=OPTIMIZERS[i % 2], **rest)
    for i, (side, mesh, which, problem, rest) in enumerate(COVERING)
]


# Of what is compiled more than once, the cases that take longest are left to `make long`.
LONG = [run for run in COMPILED if run.spelling == "naive"]
LONG += [run for run in COMPILED[:13] if str(run.mesh) in ("fsdp=2,cp=2", "pp=2,ep=2", "pp=2")]


def test_every_strategy_is_compiled_on_both_sides():
    for side in ("shard_map", "annotated"):
        compiled = {
            name for run in COMPILED if run.implementation == side and run not in LONG for name in run.strategies
        }
        missing = {"ring_attention"} if side == "annotated" else set()  # which no annotation derives
        assert compiled == set(STRATEGIES) - missing, side


@each(COMPILED, LONG)
def test_in_jax_every_strategy_equals_the_reference_on_both_sides(run, execute, reference_of):
    assert evidence.failures(run, execute(run), reference_of(run)) == []


# With experts, a rounded router may choose others than a single device does: what is compared then is no rounding.
ROUNDED = [
    make("torch", axes, replace(problem, dtype=dtype), steps=1)
    for axes, problem in [(composed(name), MLP) for name in STRATEGIES if name != "expert_parallel"]
    + [(composed("expert_parallel"), MOE)]
    for dtype in ("float32", "bfloat16")
]
ROUNDED += [
    in_jax(side, composed(name), replace(problem, dtype=dtype))
    for side, name, problem, dtype in (
        ("shard_map", "ring_attention", MLP, "float32"),
        ("annotated", "context_parallel", MLP, "bfloat16"),
    )
]


@each(ROUNDED)
def test_in_other_dtypes_a_run_is_as_exact_as_a_single_device(run, execute, reference_of):
    own = execute(evidence.single_device(run)) if run.problem.dtype == "bfloat16" else None
    assert evidence.failures(run, execute(run), reference_of(run), own) == []


# Uneven token counts: of 18 tokens a rank of sequence parallel has 7, and a rank of dp 3. The mean of the means over
# each rank's tokens would be another loss.
PADDED = Padded(**vars(MLP), lengths=(8, 7, 2, 1))
UNEVEN_TOKENS = [
    make("torch", named(mesh, *which), problem, steps=1)
    for mesh, which, problem in (
        ("dp=2", (), PADDED),
        ("fsdp=2,tp=2", ("sequence_parallel",), PADDED),
        ("cp=2", ("ring_attention",), PADDED),
        ("pp=2", (), PADDED),
        ("dp=2,cp=2", ("context_parallel",), PADDED),
        ("ep=2", (), replace(PADDED, experts=4)),
    )
]
UNEVEN_TOKENS += [in_jax("shard_map", named("cp=2", "ring_attention"), PADDED)]
UNEVEN_TOKENS += [in_jax("annotated", named("tp=2", "sequence_parallel"), PADDED)]


@each(UNEVEN_TOKENS)
def test_the_loss_is_the_mean_over_the_tokens_that_count_however_they_are_spread(run, execute, reference_of):
    assert evidence.failures(run, execute(run), reference_of(run)) == []


PAIRED, MORE = ([run for run in NAIVE if len(run.axes) == axes] for axes in (2, 3))
TRACED = [*(run for run in NAIVE if len(run.axes) == 1), *PAIRED[::4], *MORE[::3]]


@pytest.fixture(scope="module")
def traced_runs(pool):
    return traced(TRACED, pool)


@each(TRACED)
def test_torch_sends_what_the_closed_form_says_record_by_record(run, traced_runs):
    assert evidence.told(traced_runs[run]) == evidence.told(cost.communication(run))
