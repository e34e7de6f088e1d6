"""The closed form of what a rank holds in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contract.axes import AXES, one_axis
from contract.layout import cut, layout
from contract.memory import memory
from contract.problem import BYTES, DTYPES, Problem
from contract.strategy import IMPLEMENTATIONS, Run

SMALL = Problem(batch=8, width=16, layers=4)


def test_every_jax_stage_holds_as_much_as_the_longest():
    torch, jax = (
        memory(Run(i, one_axis("pipeline_parallel", 2), replace(SMALL, layers=3))) for i in ("torch", "annotated")
    )
    assert [m.parameters for m in torch] == [2 * 4 * (256 + 16), 4 * (256 + 16)]
    assert [m.parameters for m in jax] == [2 * 4 * (256 + 16)] * 2


def test_sgd_keeps_one_array_and_adamw_two():
    of = {name: memory(Run("torch", one_axis("data_parallel", 2), SMALL, name))[0] for name in ("sgd", "adamw")}
    assert of["sgd"].optimizer_state == of["sgd"].parameters
    assert of["adamw"].optimizer_state == 2 * of["adamw"].parameters


@pytest.mark.parametrize("strategy", AXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_and_gradients_are_the_bytes_of_the_layout(strategy, dtype):
    degree = 1 if strategy == "single_device" else 4
    run = Run("torch", one_axis(strategy, degree), replace(SMALL, layers=6, dtype=dtype))
    for held, parts in zip(memory(run), layout(run), strict=True):
        elements = sum(a.size for layer in cut(run.problem.parameters(), parts) for a in layer) * BYTES[dtype]
        assert held.parameters == elements
        assert held.gradients == elements // (4 if strategy == "zero2" else 1)
        assert held.optimizer_state == 2 * elements // (4 if strategy.startswith("zero") else 1)


# B = 10 (uneven over 4 ranks), D = 16, L = 6 (uneven over 4 stages): rows of 16 elements that each rank keeps, in the
# problem's dtype and in the loss's.
ACTIVATIONS = {
    "single_device": [(11 * 10, 10)],  # 2 L - 1
    "data_parallel": [(11 * 3, 3), (11 * 3, 3), (11 * 2, 2), (11 * 2, 2)],
    "tensor_parallel": [(5 * 10 + 15, 2.5)] * 4,  # L - 1 inputs, a quarter of L pre-activations
    "megatron_tensor_parallel": [(15 + 5 * 10, 10)] * 4,
    "fully_sharded": [(11 * 3, 3), (11 * 3, 3), (11 * 2, 2), (11 * 2, 2)],
    "zero1": [(11 * 3, 3), (11 * 3, 3), (11 * 2, 2), (11 * 2, 2)],
    "zero2": [(11 * 3, 3), (11 * 3, 3), (11 * 2, 2), (11 * 2, 2)],
    "pipeline_parallel": [(3 * 10, 0), (4 * 10, 0), (2 * 10, 0), (2 * 10, 10)],  # stages of 2, 2, 1, 1 layers
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("strategy", AXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_by_hand(strategy, implementation, dtype):
    want = ACTIVATIONS[strategy]
    run = Run(implementation, one_axis(strategy, len(want)), Problem(batch=10, width=16, layers=6, dtype=dtype))
    e, c = BYTES[dtype], {"float64": 8, "float32": 4, "bfloat16": 4}[dtype]
    assert [held.activations for held in memory(run)] == [16 * (rows * e + losses * c) for rows, losses in want]
    assert {type(held.activations) for held in memory(run)} == {int}


def test_gathered_weights_that_are_kept_count_as_activations():
    run = Run("torch", one_axis("fully_sharded", 4), SMALL)
    kept = memory(replace(run, reshard=False))[0].activations - memory(run)[0].activations
    assert kept == 3 * 16 * 16 * 4  # every w, whole, but the first layer's


def test_another_spelling_holds_what_the_best_one_does():
    run = Run("annotated", one_axis("fully_sharded", 4), SMALL)
    assert memory(replace(run, spelling="naive")) == memory(run)


def test_memory_is_told_by_name():
    held = memory(Run("torch", one_axis("single_device", 1), replace(SMALL, layers=1), "sgd"))[0]
    assert held.to_json() == {
        "parameters": 4 * (256 + 16),
        "gradients": 4 * (256 + 16),
        "optimizer_state": 4 * (256 + 16),
        "activations": 4 * 8 * 16 * 2,
    }
