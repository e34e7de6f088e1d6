"""The problem's numbers are drawn once for the full model and are the same however it is split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import reference
from contract.axes import AXES, one_axis
from contract.problem import DTYPES, Batch, Problem, pad_batch, split_microbatches, split_sizes, split_slices
from contract.strategy import Run

SMALL = Problem(batch=10, width=8, layers=4)


def test_shares_are_as_equal_as_can_be_larger_ones_first():
    assert split_sizes(10, 4) == [3, 3, 2, 2]
    assert split_sizes(7, 4) == [2, 2, 2, 1]
    assert split_sizes(8, 4) == [2, 2, 2, 2]
    assert split_sizes(2, 3) == [1, 1, 0]


@given(st.integers(0, 100), st.integers(1, 20))
def test_slices_cover_everything_once_and_in_order(total, parts):
    slices = split_slices(total, parts)
    assert [s.stop - s.start for s in slices] == split_sizes(total, parts)
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(total))


@given(st.integers(1, 20), st.integers(1, 8))
def test_a_padded_batch_has_equal_shares_and_the_same_loss_and_gradients(rows, parts):
    problem = Problem(batch=rows, width=4, layers=2)
    batch, params = problem.data(0), problem.parameters()
    padded = pad_batch(batch, parts)
    size = -(-rows // parts)
    assert len(padded.x) == len(padded.y) == len(padded.weight) == size * parts
    assert np.count_nonzero(padded.weight) == rows
    for share, mine in enumerate(split_slices(rows, parts)):
        first = share * size
        np.testing.assert_array_equal(padded.x[first : first + mine.stop - mine.start], batch.x[mine])
    want_loss, want = reference.loss_and_grads(params, batch)
    loss, grads = reference.loss_and_grads(params, padded)
    assert loss == pytest.approx(want_loss, rel=1e-14)
    for layer, want_layer in zip(grads, want, strict=True):
        for a, b in zip(layer, want_layer, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_a_batch_that_divides_is_not_copied():
    batch = SMALL.data(0)
    assert pad_batch(batch, 5) is batch


def test_weights_make_the_weighted_sum_the_mean():
    batch = SMALL.data(0)
    squares = (batch.x - batch.y) ** 2
    assert np.sum(batch.weight * squares) == pytest.approx(np.mean(squares), rel=1e-14)


def test_numbers_follow_from_the_seed_alone():
    for a, b in zip(SMALL.parameters(), replace(SMALL).parameters(), strict=True):
        np.testing.assert_array_equal(a.w, b.w)
        np.testing.assert_array_equal(a.b, b.b)
    other = replace(SMALL, seed=1)
    assert not np.array_equal(SMALL.parameters()[0].w, other.parameters()[0].w)
    assert not np.array_equal(SMALL.data(0).x, other.data(0).x)


@pytest.mark.parametrize("strategy", AXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_do_not_depend_on_strategy_degree_dtype_or_batch(strategy, dtype):
    run = Run(
        "torch", one_axis(strategy, 1 if strategy == "single_device" else 4), replace(SMALL, dtype=dtype, batch=20)
    )
    for a, b in zip(run.problem.parameters(), SMALL.parameters(), strict=True):
        assert a.w.dtype == a.b.dtype == np.float64
        np.testing.assert_array_equal(a.w, b.w)
        np.testing.assert_array_equal(a.b, b.b)


def test_layers_differ_and_no_bias_is_zero():
    params = SMALL.parameters()
    assert len({layer.w.tobytes() for layer in params}) == len({layer.b.tobytes() for layer in params}) == 4
    assert all(np.all(layer.b != 0) for layer in params)


def test_weights_are_scaled_by_the_full_width():
    for width in (16, 256):
        w = Problem(batch=1, width=width, layers=2).parameters()[0].w
        assert np.std(w) * np.sqrt(width) == pytest.approx(1, rel=0.15)


def test_biases_are_a_tenth_as_large():
    b = np.concatenate([layer.b for layer in Problem(batch=1, width=256, layers=4).parameters()])
    assert np.std(b) == pytest.approx(0.1, rel=0.1)


def test_parameters_are_not_drawn_from_the_numbers_of_a_batch():
    """NumPy treats seeds that differ only in trailing zeros as one seed."""
    problem = Problem(batch=8, width=8, layers=1)
    numbers = problem.parameters()[0].w * np.sqrt(8)
    for step in range(3):
        assert not np.isclose(problem.data(step).x, numbers).any()


def test_every_step_has_its_own_batch_and_inputs_are_not_targets():
    batches = [SMALL.data(step) for step in range(3)]
    assert len({a.tobytes() for batch in batches for a in (batch.x, batch.y)}) == 6
    assert batches[0].x.shape == batches[0].y.shape == (10, 8) and batches[0].weight.shape == (10, 1)


@pytest.mark.parametrize(("rows", "shares", "microbatches"), [(12, 2, 3), (10, 2, 3), (7, 3, 2), (5, 1, 2), (4, 4, 1)])
def test_microbatches_are_those_that_each_share_splits_into(rows, shares, microbatches):
    batch = Batch(*(np.arange(1.0, rows + 1)[:, None] + 100 * i for i in range(3)))
    split = split_microbatches(batch, shares, microbatches)
    size = -(-(-(-rows // shares)) // microbatches)
    for whole, parts in zip(batch, split, strict=True):
        assert parts.shape == (microbatches, shares * size, 1)
        assert sorted(parts[parts != 0]) == sorted(whole.ravel()), "every row once, and zeros"
        for s, share in enumerate(split_slices(rows, shares)):
            for m, one in enumerate(split_slices(share.stop - share.start, microbatches)):
                got = parts[m, s * size : (s + 1) * size].ravel()
                assert list(got[got != 0]) == list(whole[share][one].ravel()), (s, m)
