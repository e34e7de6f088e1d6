"""The rules of the proof: how errors are measured, how large they may be, and that a failure names claim and tensor."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import reference
from contract.axes import STRATEGIES, one_axis
from contract.layout import cut, layout
from contract.problem import BYTES, DTYPES, Layer, Problem
from contract.proof import BFLOAT16_ROUNDOFF, CLAIMS, LIMITS, SCALARS, distances, error, limits, prove, scalar_error
from contract.share import names
from contract.strategy import Run, RunResult, Shard

SMALL = Problem(batch=6, width=8, layers=4)


def ideal(run: Run) -> RunResult:
    """The result of a run without any error: the reference's, with the shards that the layout asks for."""
    result = reference.run(run)
    dtype = run.problem.dtype
    for rank, parts in enumerate(layout(run)):
        held = {}
        for part, layer in zip(parts, cut(result.params, parts), strict=True):
            for name, index, array in zip(names(part), part.cuts, layer, strict=True):
                digests = tuple(f"{name} {index} {step}" for step in range(run.steps + 1))
                held[name] = Shard(array.shape, dtype, array.size * BYTES[dtype], digests)
        assert rank == len(result.shards)
        result.shards.append(held)
    return result


def small_run(
    strategy: str = "data_parallel", dtype: str = "float32", optimizer: str = "adamw", degree: int = 2
) -> Run:
    return Run("torch", one_axis(strategy, degree), replace(SMALL, dtype=dtype), optimizer, steps=2, microbatches=2)


def scaled(layers: list[Layer], layer: int, kind: int, factor: float) -> list[Layer]:
    """The layers with one tensor (0: w, 1: b) multiplied."""
    changed = [list(pair) for pair in layers]
    changed[layer][kind] = changed[layer][kind] * factor
    return [Layer(*pair) for pair in changed]


@given(st.floats(1e-12, 1e3), st.integers(0, 2**32 - 1))
def test_error_is_the_relative_distance_over_all_layers(factor, seed):
    rng = np.random.default_rng(seed)
    want = [Layer(rng.standard_normal((3, 3)), rng.standard_normal(3)) for _ in range(2)]
    got = [Layer(w * (1 + factor), b * (1 + factor)) for w, b in want]
    assert error(want, want) == 0
    assert error(got, want) == pytest.approx(factor, rel=1e-3)


def test_error_of_what_cannot_be_compared_is_infinite():
    one = [Layer(np.ones((2, 2)), np.ones(2))]
    assert error([], one) == math.inf
    assert error([Layer(np.ones((1, 2)), np.ones(2))], one) == math.inf  # would broadcast
    assert error([Layer(np.full((2, 2), 1e300), np.ones(2))], one) == math.inf  # overflows
    zero = [Layer(np.zeros((2, 2)), np.zeros(2))]
    assert error(one, zero) == math.inf
    assert error(zero, zero) == 0
    assert scalar_error(np.ones(2), np.ones(3)) == math.inf
    assert math.isnan(scalar_error(np.array([math.nan, 1.0]), np.ones(2)))
    assert math.isnan(scalar_error(np.array([1.0, math.nan]), np.ones(2)))


def test_errors_are_taken_in_float64():
    large, one = np.full(1, 1e8, np.float32), np.ones(1, np.float32)
    assert error([Layer(large, one)], [Layer(-one, one)]) == pytest.approx(100_000_001 / 2**0.5, rel=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_without_error_passes(strategy, dtype, optimizer):
    run = small_run(strategy, dtype, optimizer)
    proof = prove(run, ideal(run), reference.run(run), own=ideal(run))
    assert proof.passed and not proof.failures
    assert proof.errors == dict.fromkeys(CLAIMS, 0.0)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -1.0, 1 + 2e-5])
@pytest.mark.parametrize("claim", CLAIMS)
def test_a_wrong_number_fails_its_claim_alone_and_names_the_tensor(claim, factor):
    run = small_run()
    got, want = ideal(run), reference.run(run)
    second = np.array([1.0, factor])

    def wrong(layers: list[Layer]) -> list[Layer]:
        return [Layer(w * factor, b) for w, b in layers]

    changed, where = {
        "loss": (replace(got, losses=got.losses * second), "step 1"),
        "gradient norm": (replace(got, grad_norms=got.grad_norms * second), "step 1"),
        "gradients": (replace(got, grads=wrong(got.grads)), "w"),
        "parameters": (replace(got, params=wrong(got.params)), "w"),
        "optimizer state": (
            replace(got, optimizer_state={**got.optimizer_state, "v": wrong(got.optimizer_state["v"])}),
            "v of w",
        ),
    }[claim]
    (failure,) = prove(run, changed, want).failures
    assert failure.startswith(f"{claim}: error ")
    assert f"largest in {where}" in failure


@pytest.mark.parametrize(("layer", "kind", "name"), [(0, 0, "w0"), (1, 1, "b1"), (3, 0, "w3")])
def test_the_tensor_that_is_furthest_off_is_named(layer, kind, name):
    run = small_run()
    got, want = ideal(run), reference.run(run)
    (failure,) = prove(run, replace(got, grads=scaled(got.grads, layer, kind, 1.5)), want).failures
    assert failure.endswith(f"largest in {name}")


@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize("claim", SCALARS)
def test_the_step_that_is_furthest_off_is_named(claim, step):
    run = replace(small_run(), steps=3)
    got, want = ideal(run), reference.run(run)
    factors = np.full(3, 1.01)
    factors[step] = 1.02
    field = {"loss": "losses", "gradient norm": "grad_norms"}[claim]
    (failure,) = prove(run, replace(got, **{field: getattr(got, field) * factors}), want).failures
    assert failure == f"{claim}: error 0.02, at most 1e-05 allowed; largest in step {step}"


def test_what_is_missing_is_named():
    run = small_run()
    got, want = ideal(run), reference.run(run)
    (failure,) = prove(run, replace(got, optimizer_state={"m": got.optimizer_state["m"]}), want).failures
    assert failure.endswith("largest in v of the layers, of which there are 0 instead of 4")
    (failure,) = prove(run, replace(got, params=got.params[1:]), want).failures
    assert failure.endswith("largest in the layers, of which there are 3 instead of 4")
    (failure,) = prove(run, replace(got, losses=got.losses[:1]), want).failures
    assert failure.endswith("largest in the number of steps, 1 instead of 2")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_limit_of_a_dtype_is_where_it_should_be(dtype):
    run = small_run(dtype=dtype)
    got, want = ideal(run), reference.run(run)
    for factor, holds in ((0.9, True), (1.1, False)):
        close = replace(got, losses=got.losses * (1 + factor * LIMITS[dtype]))
        assert prove(run, close, want).passed is holds


def test_bfloat16_may_be_twice_as_far_as_the_single_device_run():
    run = small_run(dtype="bfloat16")
    got, want = ideal(run), reference.run(run)
    own = replace(got, params=[Layer(w * 1.01, b * 1.01) for w, b in got.params])
    for factor, holds in ((1.019, True), (1.021, False)):
        far = replace(got, params=[Layer(w * factor, b * factor) for w, b in got.params])
        assert prove(run, far, want, own).passed is holds
    message = "^a bfloat16 run is judged by the error of a single-device bfloat16 run: pass its errors$"
    with pytest.raises(ValueError, match=message):
        prove(run, got, want)


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e25])
def test_a_single_device_run_that_is_lost_excuses_no_other(factor):
    run = small_run(dtype="bfloat16")
    got, want = ideal(run), reference.run(run)
    lost = replace(got, params=[Layer(w * factor, b) for w, b in got.params])
    (failure,) = prove(run, lost, want, own=lost).failures
    assert failure.startswith("parameters: error ")


def test_a_bfloat16_scalar_that_is_right_by_luck_does_not_bind_the_others():
    bounds = limits("bfloat16", dict.fromkeys(CLAIMS, 1e-9))
    assert {claim for claim, bound in bounds.items() if bound == BFLOAT16_ROUNDOFF} == set(SCALARS)
    assert {bounds[claim] for claim in CLAIMS if claim not in SCALARS} == {2e-9}


def test_a_missing_or_small_slot_of_the_optimizer_is_not_covered_by_another():
    run = small_run()
    got, want = ideal(run), reference.run(run)
    assert distances(replace(got, optimizer_state={"m": got.optimizer_state["m"]}), want)["optimizer state"] == math.inf
    wrong = [Layer(2 * w, 2 * b) for w, b in got.optimizer_state["v"]]
    assert distances(replace(got, optimizer_state={**got.optimizer_state, "v": wrong}), want)["optimizer state"] == 1


def changed_shard(run: Run, rank: int, name: str, **changes) -> RunResult:
    result = ideal(run)
    result.shards[rank][name] = replace(result.shards[rank][name], **changes)
    return result


def failures(run: Run, got: RunResult) -> tuple[str, ...]:
    return prove(run, got, reference.run(run)).failures


def test_a_parameter_in_another_dtype_fails_whatever_its_value():
    run = small_run("pipeline_parallel")
    assert failures(run, changed_shard(run, 1, "b3", dtype="bfloat16")) == (
        "dtype: b3 on rank 1 is bfloat16, not float32",
    )


@pytest.mark.parametrize(("strategy", "name"), [("data_parallel", "w2"), ("megatron_tensor_parallel", "b1")])
def test_replicas_that_part_fail_even_within_the_limit(strategy, name):
    run = small_run(strategy)
    digests = ideal(run).shards[1][name].digests
    got = changed_shard(run, 1, name, digests=(*digests[:2], "other bits"))
    assert failures(run, got) == (f"replicas: {name} differs between ranks 0 and 1 after 2 steps",)


def test_shards_of_different_parts_may_differ():
    run = small_run("tensor_parallel")
    assert failures(run, changed_shard(run, 1, "w0", digests=("a", "b", "c"))) == ()


def test_missing_evidence_is_a_failure():
    run = small_run()
    assert failures(run, reference.run(run)) == ("shards: 0 ranks reported their shards, not 2",)
    assert failures(run, changed_shard(run, 0, "w0", digests=())) == ("replicas: w0 on rank 0 has 0 digests, not 3",)
    got = ideal(run)
    del got.shards[1]["b0"]
    held = "shards: rank 1 holds b1 b2 b3 w0 w1 w2 w3, not b0 b1 b2 b3 w0 w1 w2 w3"
    assert failures(run, got) == (held,)
    got.shards[1]["w3"] = replace(got.shards[1]["w3"], digests=("a", "b", "c"), dtype="bfloat16")
    # of wrong shards the first is told; replicas are compared as far as they are there
    assert failures(run, got) == (held, "replicas: w3 differs between ranks 0 and 1 after 0 steps")


def test_float32_is_also_allowed_twice_the_error_of_a_single_device_where_that_is_larger():
    own = dict.fromkeys(CLAIMS, 3e-5) | {"loss": 1e-7, "gradients": 1.0, "parameters": math.nan}
    bounds = limits("float32", own)
    assert bounds["optimizer state"] == 6e-5 and bounds["loss"] == 1e-5, "never less than without"
    assert bounds["gradients"] == 1e-3, "a single device that is lost excuses nothing"
    assert math.isnan(bounds["parameters"]) and limits("float32") == dict.fromkeys(CLAIMS, 1e-5)
    assert limits("float64", own) == dict.fromkeys(CLAIMS, 1e-12)
