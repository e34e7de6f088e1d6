"""All three implementations of every strategy equal the one reference, number by number. A run is computed once."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract import proof
from contract.axes import AXES, STRATEGIES, one_axis
from contract.optimizer import OPTIMIZERS
from contract.problem import DTYPES, Problem
from contract.strategy import IMPLEMENTATIONS, Run
from shared_tests import evidence
from shared_tests.evidence import each
from shared_tests.on_ranks import loss_alone, train_with_buckets

SIZES = Problem(batch=12, width=8, layers=4)
DEGREES = (1, 2, 4)


def make(implementation: str, strategy: str, degree: int, dtype: str = "float64", optimizer: str = "adamw", **rest):
    sizes = {key: rest.pop(key) for key in ("batch", "width", "layers") if key in rest}
    problem = replace(SIZES, dtype=dtype, **sizes)
    return Run(
        implementation, one_axis(strategy, degree), problem, optimizer, device="cpu", **{"microbatches": 3, **rest}
    )


# Every pair of degree, dtype and optimizer, not every triple: half as many runs. In JAX, which compiles for each, every
# degree in float64, and the other dtypes once each; of these, all but degree 4 in float64 by turns on either side.
IN_JAX = [(1, "float64"), (2, "float64"), (4, "float64"), (4, "float32"), (2, "bfloat16")]
BY_TURNS = [cell for cell in IN_JAX if cell != (4, "float64")]
CASES = [
    make(implementation, strategy, degree, dtype, OPTIMIZERS[(i + j) % 2])
    for implementation in IMPLEMENTATIONS
    for strategy in STRATEGIES
    for (i, degree), (j, dtype) in product(enumerate(DEGREES), enumerate(DTYPES))
    if implementation == "torch" or (degree, dtype) in (IN_JAX[2:] if AXES[strategy] == "fsdp" else IN_JAX)
]
CASES += [
    make(implementation, "single_device", 1, dtype, name)
    for implementation in IMPLEMENTATIONS
    for dtype in DTYPES
    for name in OPTIMIZERS
    if implementation == "torch" or dtype == "float64" or name == "adamw"
]


LONG = {  # the other side's turn
    run
    for run in CASES
    for j, cell in enumerate(BY_TURNS)
    if run.strategies and (run.world_size, run.problem.dtype) == cell
    if run.implementation == ("shard_map", "annotated")[(STRATEGIES.index(run.strategy) + j) % 2]
}


SIDES = ["torch", *(pytest.param(side, marks=pytest.mark.long) for side in IMPLEMENTATIONS[1:])]


@pytest.fixture(scope="session")
def failures(execute, reference_of):
    """A function that returns the claims that a run's result does not satisfy, as lines."""

    def of(run: Run) -> list[str]:
        own = execute(evidence.single_device(run)) if run.problem.dtype == "bfloat16" else None
        return evidence.failures(run, execute(run), reference_of(run), own)

    return of


@each(CASES, LONG)
def test_a_run_equals_the_reference(run, failures):
    assert failures(run) == []


@each(
    [
        replace(run, steps=steps)
        for run in CASES
        if run.problem.dtype == "float64" and run.world_size > 1
        for steps in range(1, run.steps)
    ]
)
def test_a_run_equals_the_reference_after_every_step(run, failures):
    assert failures(run) == []


@each([run for run in CASES if run.strategy == "single_device" and run.problem.dtype == "bfloat16"])
def test_bfloat16_on_one_device_is_off_by_roundoff(run, execute, reference_of):
    errors = proof.distances(execute(run), reference_of(run))
    assert all(1e-5 < errors[claim] < 16 * proof.BFLOAT16_ROUNDOFF for claim in proof.CLAIMS), errors


ON_EVERY_SIDE = [run for run in CASES if all(replace(run, implementation=side) in CASES for side in IMPLEMENTATIONS)]
NOT_YET = [run for run in ON_EVERY_SIDE if any(replace(run, implementation=side) in LONG for side in IMPLEMENTATIONS)]


@each([run for run in ON_EVERY_SIDE if run.strategies or run.optimizer == "sgd"], NOT_YET)
def test_rank_r_holds_the_same_shard_on_every_side(run, execute):
    got = execute(run)
    assert evidence.misplaced(run, got) == []  # shape, dtype, bytes and bits, from the layout
    for other in IMPLEMENTATIONS:
        theirs = execute(replace(run, implementation=other))
        for mine, his in zip(got.shards, theirs.shards, strict=True):
            assert {n: replace(s, digests=s.digests[:1]) for n, s in mine.items()} == {
                n: replace(s, digests=s.digests[:1]) for n, s in his.items()
            }, other


@each(
    [run for run in CASES if run.world_size > 1 and run.strategy in ("data_parallel", "megatron_tensor_parallel")], LONG
)
def test_replicas_are_bit_equal_after_every_step(run, execute):
    names = {"data_parallel": {"w0", "b3"}, "megatron_tensor_parallel": {"b1", "b3"}}[run.strategy]
    shards = execute(run).shards
    for name in names:
        first, *others = [shards[rank][name].digests for rank in range(run.world_size)]
        assert others == [first] * (run.world_size - 1), name
        assert len(set(first)) == run.steps + 1  # and every step changes them
    assert proof.differing_replicas(run, execute(run)) == []  # nor any other


@each(
    [run for run in CASES if run.problem.dtype == "float64" and (run.implementation == "torch" or run.world_size > 2)]
)
def test_the_loss_without_gradients_is_the_same_on_every_rank(run, pool, reference_of):
    want = reference_of(run).losses[0]
    if run.implementation == "torch":
        losses = pool.call(loss_alone, run, world_size=run.world_size)
        assert losses == [losses[0]] * run.world_size
    else:
        losses = [loss_in_jax(run)]
    assert losses[0] == pytest.approx(want, rel=1e-12)


UNEVEN = [(10, 4), (5, 4), (2, 2), (4, 4), (7, 2)]  # batch, degree


@each(
    [
        make(implementation, "data_parallel", degree, batch=batch)
        for implementation in IMPLEMENTATIONS
        for batch, degree in (UNEVEN if implementation == "torch" else UNEVEN[:3])
    ]
)
def test_data_parallel_is_exact_for_any_batch(run, failures):
    assert failures(run) == []


@each([make("torch", "data_parallel", n, dtype, overlap=False) for n in DEGREES for dtype in DTYPES])
def test_naive_data_parallel_equals_the_reference(run, failures):
    assert failures(run) == []


@each([make("torch", "data_parallel", 2, dtype) for dtype in DTYPES])
def test_overlap_changes_no_bit_between_two_ranks(run, execute):
    assert (
        evidence.different(execute(run), execute(replace(run, overlap=False))) == []
    )  # a + b = b + a, whatever is in between


# A shard of b fills a vector register, so AdamW computes as much at once with it as with all.
@each([make("torch", s, 2, dtype, width=64) for s in STRATEGIES if AXES[s] == "fsdp" for dtype in DTYPES])
def test_between_two_ranks_zero_changes_no_bit_of_data_parallel(run, execute):
    want = execute(replace(run, axes=one_axis("data_parallel", 2)))
    for changes in ({}, {"overlap": False}, {"reshard": False}, {"reshard": False, "overlap": False}):
        assert evidence.different(execute(replace(run, **changes)), want) == [], changes


@each(
    [make(implementation, "fully_sharded", 4, reshard=False, batch=10) for implementation in IMPLEMENTATIONS]
    + [make("annotated", "fully_sharded", 4, spelling="naive")]
    + [make("torch", s, 4, overlap=False, batch=10) for s in STRATEGIES if AXES[s] == "fsdp"]
)
def test_fully_sharded_is_exact_however_it_is_done(run, failures):
    assert failures(run) == []


@pytest.mark.parametrize("limit", [1, 64, 600, 1 << 30])
@each([make("torch", "data_parallel", 4, "float64", batch=10)])
def test_data_parallel_does_not_depend_on_the_size_of_its_buckets(run, limit, pool, reference_of):
    from torch_impl import train

    ranks = pool.call(train_with_buckets, run, limit, world_size=run.world_size)
    assert evidence.failures(run, train.assemble(run, ranks), reference_of(run)) == []


PIPELINES = [  # stages, layers, batch, microbatches; JAX compiles for each, and leaves out the plainest
    (1, 4, 12, 4),
    (1, 5, 10, 3),  # uneven microbatches
    (2, 4, 12, 1),
    (2, 4, 12, 4),
    (2, 5, 10, 4),  # stages of 3 and 2 layers, microbatches of 3 and 2
    (2, 4, 3, 3),  # microbatches of one sample
    (4, 4, 12, 1),
    (4, 4, 12, 2),  # fewer than stages
    (4, 4, 12, 6),  # more
    (4, 7, 10, 4),  # stages of 2 layers and 1
]


OF_STAGES = [
    make(implementation, "pipeline_parallel", stages, layers=layers, batch=batch, microbatches=microbatches)
    for implementation in IMPLEMENTATIONS
    for stages, layers, batch, microbatches in (PIPELINES if implementation == "torch" else PIPELINES[4:])
]


@each(OF_STAGES, [run for i, run in enumerate(OF_STAGES) if run.implementation != "torch" and i % 2])
def test_a_pipeline_is_exact_for_any_stages_and_microbatches(run, failures):
    assert failures(run) == []


@pytest.mark.parametrize("implementation", SIDES)
def test_loss_and_gradients_do_not_depend_on_the_number_of_microbatches(implementation, execute):
    results = {m: execute(make(implementation, "pipeline_parallel", 4, microbatches=m)) for m in (1, 2, 3, 6)}
    for m, got in results.items():
        assert max(proof.distances(got, results[1]).values()) < 1e-13, f"{m} microbatches and 1"


@each(
    [make("torch", "pipeline_parallel", n, dtype, microbatches=1) for n in DEGREES for dtype in DTYPES]
    + [make("shard_map", "pipeline_parallel", 1, dtype, microbatches=1) for dtype in ("float64", "bfloat16")]
)
def test_a_pipeline_with_one_microbatch_is_bit_equal_to_a_single_device(run, execute):
    assert evidence.different(execute(run), execute(evidence.single_device(run))) == []


@each([make("shard_map", "pipeline_parallel", n, dtype, microbatches=1) for n, dtype in zip((2, 4, 4), DTYPES)])
def test_a_compiled_pipeline_with_one_microbatch_has_bit_equal_loss_and_gradients(run, execute):
    # The update is compiled anew for the shapes of a stage, and may fuse multiplication and addition elsewhere.
    run = replace(run, steps=1)
    assert {"losses", "grads"}.isdisjoint(evidence.different(execute(run), execute(evidence.single_device(run))))


def loss_in_jax(run: Run) -> float:
    import jax

    from jax_impl import compose, train
    from jax_impl.mesh import make_mesh
    from shardiff.ranks import jax_devices as devices

    with jax.enable_x64(True):
        mesh = make_mesh(run, devices.devices(run.world_size, "cpu"))
        params, batch = train.make_params(mesh, run), train.make_batch(mesh, run, 0)
        return float(jax.jit(lambda params, batch: compose.loss(params, batch, mesh, run))(params, batch))


@st.composite
def small_runs(draw, implementation, strategies):
    strategy = draw(st.sampled_from(strategies))
    degree = draw(st.sampled_from((2, 4, 1)))  # simplest first
    batch, width, layers = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    if AXES[strategy] in ("dp", "fsdp"):
        batch = max(batch, degree)
    if strategy == "pipeline_parallel":
        layers = max(layers, degree)
    if AXES[strategy] in ("tp", "fsdp"):
        width *= degree
        layers += layers % 2 if strategy == "megatron_tensor_parallel" else 0
    microbatches = draw(st.integers(1, min(batch, 5)))
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    sizes = Problem(batch, width, layers, "float64", seed=draw(st.integers(0, 3)))
    return Run(implementation, one_axis(strategy, degree), sizes, optimizer, 2, microbatches, device="cpu")


@pytest.mark.parametrize(
    ("implementation", "strategies", "examples"),
    [
        *(("torch", (strategy,), 8) for strategy in STRATEGIES),
        pytest.param("shard_map", STRATEGIES, 6, marks=pytest.mark.long),
        pytest.param("annotated", STRATEGIES, 6, marks=pytest.mark.long),
    ],
)
def test_every_run_that_can_work_equals_the_reference(implementation, strategies, examples, execute, reference_of):
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(small_runs(implementation, strategies))
    def equal(run):
        assert evidence.failures(run, execute(run), reference_of(run)) == []

    equal()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", ("single_device", *STRATEGIES))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_gpu_equals_the_reference(implementation, strategy, dtype, execute_on_gpu, reference_of):
    problem = Problem(batch=64, width=256, layers=4, dtype=dtype)
    run = Run(implementation, one_axis(strategy, 1), problem, "adamw", 3, 4, device="cuda")
    own = execute_on_gpu(evidence.single_device(run)) if dtype == "bfloat16" else None
    assert evidence.failures(run, execute_on_gpu(run), reference_of(run), own) == []
