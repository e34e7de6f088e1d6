"""The reference is checked: its gradients by finite differences, its updates and its activation by known values."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from contract import blocks, reference
from contract.axes import STRATEGIES, one_axis
from contract.optimizer import SLOTS, AdamW, Sgd, adamw_update, sgd_update
from contract.problem import Layer, Problem
from contract.strategy import Run

SMALL = Problem(batch=3, width=4, layers=3)


def test_normal_cdf_is_the_standard_library_s():
    x = np.linspace(-6, 6, 61).reshape(1, 61)
    want = [[NormalDist().cdf(v) for v in x[0]]]
    np.testing.assert_allclose(blocks.normal_cdf(x), want, rtol=1e-9, atol=1e-15)
    assert blocks.normal_cdf(np.zeros((2, 3))).tolist() == [[0.5] * 3] * 2


def test_gelu_is_by_erf_not_by_tanh():
    out, _ = reference.forward([Layer(np.eye(1), np.zeros(1))], np.array([[1.0], [-2.0], [0.0]]))
    np.testing.assert_allclose(out[:, 0], [0.8413447460685429, -0.04550026389635842, 0], rtol=1e-14)
    tanh = 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (1 + 0.044715)))
    assert abs(out[0, 0] - tanh) > 1e-4


def test_the_loss_is_the_mean_of_the_squared_errors():
    params, batch = SMALL.parameters(), SMALL.data(0)
    x = batch.x
    for w, b in params:
        z = x @ w + b
        x = z * blocks.normal_cdf(z)
    loss, _ = reference.loss_and_grads(params, batch)
    assert loss == pytest.approx(np.mean((x - batch.y) ** 2), rel=1e-14)


@pytest.mark.parametrize("layer", range(SMALL.layers))
@pytest.mark.parametrize("kind", ["w", "b"])
def test_every_gradient_is_the_central_difference(layer, kind):
    params, batch = SMALL.parameters(), SMALL.data(0)
    _, grads = reference.loss_and_grads(params, batch)
    got = getattr(grads[layer], kind)
    tensor = getattr(params[layer], kind)  # perturbed in place, element by element
    want, h = np.empty_like(tensor), 1e-5
    for index in np.ndindex(tensor.shape):
        value = tensor[index]
        sides = []
        for side in (value + h, value - h):
            tensor[index] = side
            sides.append(reference.loss_and_grads(params, batch)[0])
        tensor[index] = value
        want[index] = (sides[0] - sides[1]) / (2 * h)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9)
    assert np.linalg.norm(got) > 1e-3  # not equal because both vanish


def test_a_norm_is_taken_in_float64():
    layers = [Layer(np.full((2, 2), 3e30, np.float32), np.full(2, 4e30, np.float32))]  # their squares overflow float32
    assert reference.norm(layers) == pytest.approx(math.sqrt(4 * 9e60 + 2 * 16e60), rel=1e-6)


def test_sgd_by_hand():
    p, v = np.array([1.0]), np.array([0.0])
    p, v = sgd_update(p, np.array([2.0]), v, Sgd(lr=0.1, momentum=0.9))
    assert (p[0], v[0]) == (pytest.approx(0.8), 2.0)
    p, v = sgd_update(p, np.array([1.0]), v, Sgd(lr=0.1, momentum=0.9))
    assert v[0] == pytest.approx(2.8)  # 0.9 * 2 + 1
    assert p[0] == pytest.approx(0.52)  # 0.8 - 0.1 * 2.8


def test_adamw_by_hand():
    opt = AdamW(lr=0.1, b1=0.9, b2=0.99, eps=0.5, weight_decay=0.2)
    p, m, v = np.array([1.0]), np.zeros(1), np.zeros(1)
    p, m, v = adamw_update(p, np.array([2.0]), m, v, 1, opt)
    assert (m[0], v[0]) == (pytest.approx(0.2), pytest.approx(0.04))
    # the first corrected moments are g and g^2; decay 0.1 * 0.2 * 1; epsilon outside the root
    assert p[0] == pytest.approx(1 - 0.02 - 0.1 * 2 / (2 + 0.5))
    before = p[0]
    p, m, v = adamw_update(p, np.array([-1.0]), m, v, 2, opt)
    assert m[0] == pytest.approx(0.08)  # 0.9 * 0.2 - 0.1
    assert v[0] == pytest.approx(0.0496)  # 0.99 * 0.04 + 0.01
    m_hat, v_hat = 0.08 / (1 - 0.81), 0.0496 / (1 - 0.9801)
    assert p[0] == pytest.approx(before - 0.02 * before - 0.1 * m_hat / (math.sqrt(v_hat) + 0.5))


@pytest.mark.parametrize("optimizer", SLOTS)
def test_a_run_is_its_steps_one_by_one(optimizer):
    run = Run(
        axes=one_axis("data_parallel", 1), problem=Problem(batch=4, width=4, layers=2), optimizer=optimizer, steps=3
    )
    got, params = reference.run(run), run.problem.parameters()
    state = [[[np.zeros_like(a) for _ in SLOTS[optimizer]] for a in layer] for layer in params]
    for step in range(3):
        loss, grads = reference.loss_and_grads(params, run.problem.data(step))
        assert got.losses[step] == loss
        squares = sum(np.sum(a**2) for layer in grads for a in layer)
        assert got.grad_norms[step] == pytest.approx(math.sqrt(squares), rel=1e-14)
        if step == 0:
            np.testing.assert_array_equal(got.grads[1].w, grads[1].w)
        for i, layer in enumerate(params):
            updated = []
            for kind, p in enumerate(layer):
                if optimizer == "sgd":
                    p, *state[i][kind] = sgd_update(p, grads[i][kind], *state[i][kind], Sgd())
                else:
                    p, *state[i][kind] = adamw_update(p, grads[i][kind], *state[i][kind], step + 1, AdamW())
                updated.append(p)
            params[i] = Layer(*updated)
    for i, layer in enumerate(params):
        for kind, p in enumerate(layer):
            np.testing.assert_array_equal(got.params[i][kind], p)
            for slot, value in zip(SLOTS[optimizer], state[i][kind], strict=True):
                np.testing.assert_array_equal(got.optimizer_state[slot][i][kind], value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_reference_is_one_for_all_strategies_and_degrees(strategy):
    base = Run(axes=one_axis("data_parallel", 1), problem=Problem(batch=4, width=4, layers=4), steps=2)
    want = reference.run(base)
    got = reference.run(replace(base, axes=one_axis(strategy, 4)))
    np.testing.assert_array_equal(got.losses, want.losses)
    np.testing.assert_array_equal(got.params[3].w, want.params[3].w)
    assert got.shards == []


def test_training_lowers_the_loss():
    problem = Problem(batch=64, width=8, layers=2)
    params, batch = problem.parameters(), problem.data(0)
    first, grads = reference.loss_and_grads(params, batch)
    after = [
        Layer(*(p - 0.1 * g for p, g in zip(layer, g_layer, strict=True)))
        for layer, g_layer in zip(params, grads, strict=True)
    ]
    assert reference.loss_and_grads(after, batch)[0] < first
