"""Where a gradient is taken decides who sums it over the ranks.

The strategies take it outside shard_map. Inside, JAX sums the gradient of a replicated parameter itself if check_vma is
on, and does not if it is off. Whoever adds or omits a psum must know which.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shardiff.ranks import jax_devices as devices

SIZES = (2, 4)
RNG = np.random.default_rng(0)
W, X = RNG.standard_normal(3), RNG.standard_normal((8, 3))  # w replicated; samples over the ranks


def share(w, x):
    """These samples' share of the loss sum((x @ w)^2)."""
    return ((x @ w) ** 2).sum()


WANT = 2 * X.T @ (X @ W)  # the gradient of the sum over all samples


def of_each_rank(function, size, check_vma):
    """function(w, a rank's samples) in every rank: [size, 3]."""
    mesh = jax.make_mesh((size,), ("dp",), axis_types=(AxisType.Auto,), devices=devices.devices(size, "cpu"))
    with jax.enable_x64(True):
        mapped = jax.shard_map(
            lambda w, x: function(w, x)[None],
            mesh=mesh,
            in_specs=(P(), P("dp")),
            out_specs=P("dp"),
            check_vma=check_vma,
        )
        return np.asarray(jax.jit(mapped)(W, X))


def local_gradients(size):
    return [2 * x.T @ (x @ W) for x in np.split(X, size)]


@pytest.mark.parametrize("size", SIZES)
def test_inside_with_check_vma_the_sum_over_ranks_is_implicit(size):
    got = of_each_rank(jax.grad(share), size, check_vma=True)
    np.testing.assert_allclose(got, [WANT] * size, rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_inside_with_check_vma_an_explicit_psum_counts_it_once_more_for_every_rank(size):
    got = of_each_rank(lambda w, x: lax.psum(jax.grad(share)(w, x), "dp"), size, check_vma=True)
    np.testing.assert_allclose(got, [size * WANT] * size, rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_inside_with_check_vma_the_gradient_of_the_summed_loss_is_right(size):
    got = of_each_rank(jax.grad(lambda w, x: lax.psum(share(w, x), "dp")), size, check_vma=True)
    np.testing.assert_allclose(got, [WANT] * size, rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_inside_with_check_vma_a_varying_parameter_is_not_summed(size):
    got = of_each_rank(lambda w, x: jax.grad(share)(lax.pcast(w, "dp", to="varying"), x), size, check_vma=True)
    np.testing.assert_allclose(got, local_gradients(size), rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_inside_without_check_vma_nothing_is_summed(size):
    got = of_each_rank(jax.grad(share), size, check_vma=False)
    np.testing.assert_allclose(got, local_gradients(size), rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_inside_without_check_vma_an_explicit_psum_is_right(size):
    got = of_each_rank(lambda w, x: lax.psum(jax.grad(share)(w, x), "dp"), size, check_vma=False)
    np.testing.assert_allclose(got, [WANT] * size, rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_inside_without_check_vma_the_gradient_of_the_summed_loss_is_local_and_n_times_too_large(size):
    # psum is its own transpose there: every rank's cotangent 1 is summed to n
    got = of_each_rank(jax.grad(lambda w, x: lax.psum(share(w, x), "dp")), size, check_vma=False)
    np.testing.assert_allclose(got, size * np.array(local_gradients(size)), rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check_vma", [True, False])
def test_outside_as_the_strategies_take_it_the_gradient_is_right_either_way(size, check_vma):
    mesh = jax.make_mesh((size,), ("dp",), axis_types=(AxisType.Auto,), devices=devices.devices(size, "cpu"))
    with jax.enable_x64(True):
        loss = jax.shard_map(
            lambda w, x: lax.psum(share(w, x), "dp"),
            mesh=mesh,
            in_specs=(P(), P("dp")),
            out_specs=P(),
            check_vma=check_vma,
        )
        got = jax.jit(jax.grad(loss))(W, X)
    np.testing.assert_allclose(got, WANT, rtol=1e-12)


def test_with_check_vma_a_loss_that_is_not_summed_is_refused():
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Auto,), devices=devices.devices(2, "cpu"))
    loss = jax.shard_map(share, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(loss)(W.astype(np.float32), X.astype(np.float32))
