"""The eight collectives do what NumPy defines, in both frameworks, and every backward one transposes its forward."""

from __future__ import annotations

import functools
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_impl import collectives
from shardiff.ranks import jax_devices as devices
from shared_tests import definitions, on_ranks
from shared_tests.definitions import DEFINITIONS, PAIRS, REPLICATED_INPUT, REPLICATED_OUTPUT, ROOTED
from shared_tests.evidence import often

SIZES = (1, 2, 4)
DTYPES = ("float64", "float32", "bfloat16", "int32")


def cases(op, size, laid_out="by rows"):
    """(arguments, dtype, every rank's array)"""
    return [
        (arguments, dtype, definitions.inputs(size, numpy_dtype(dtype)))
        for arguments in definitions.arguments(op, size)
        for dtype in (DTYPES if laid_out == "by rows" else DTYPES[:1])
    ]


def numpy_dtype(name):
    return ml_dtypes.bfloat16 if name == "bfloat16" else name


def assert_equal(got, want, where):
    np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(want, np.float64), err_msg=str(where))


@pytest.fixture(scope="module")
def in_torch(pool):
    """(op, layout, size) -> each rank's results of its cases; all of one size in one call of the pool."""
    results = {}
    for size in SIZES:
        tried = list(product(DEFINITIONS, on_ranks.LAYOUTS))
        calls = [(op, [(a, xs) for a, _, xs in cases(op, size, laid_out)], laid_out) for op, laid_out in tried]
        ranks = pool.call(on_ranks.every, on_ranks.collectives, calls, world_size=size)
        results |= {(*one, size): of_one for one, *of_one in zip(tried, *ranks, strict=True)}
    return results


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("laid_out", on_ranks.LAYOUTS)
@pytest.mark.parametrize("op", DEFINITIONS)
def test_torch_collective_is_what_numpy_defines(op, laid_out, size, in_torch):
    tried, ranks = cases(op, size, laid_out), in_torch[op, laid_out, size]
    for i, (arguments, dtype, xs) in enumerate(tried):
        for rank, want in enumerate(DEFINITIONS[op](xs, **arguments)):
            got, where = ranks[rank][i], (op, arguments, dtype, f"rank {rank} of {size}")
            if want is None:
                assert got is None, where
            else:
                assert got[0] == dtype, where
                assert_equal(got[1], want, where)


def make_mesh(size):
    return jax.make_mesh((size,), ("x",), axis_types=(AxisType.Auto,), devices=devices.devices(size, "cpu"))


def on_mesh(function, size, xs):
    """The function in shard_map over `size` ranks, where rank r has xs[r]; the ranks' results are stacked."""
    mesh = make_mesh(size)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    return jax.jit(mapped)(jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *xs))


@pytest.mark.parametrize("size", often(SIZES, (1, 4)))
@pytest.mark.parametrize("op", DEFINITIONS)
def test_jax_collective_is_what_numpy_defines(op, size):
    tried = cases(op, size)

    def every_case(arrays):
        return [
            getattr(collectives, op)(x, axis="x", **arguments)
            for (arguments, _, _), x in zip(tried, arrays, strict=True)
        ]

    with jax.enable_x64(True):
        results = on_mesh(every_case, size, [[xs[rank] for _, _, xs in tried] for rank in range(size)])
    for (arguments, dtype, xs), stacked in zip(tried, results, strict=True):
        assert stacked.dtype == numpy_dtype(dtype)
        for rank, want in enumerate(DEFINITIONS[op](xs, **arguments)):
            got = np.split(np.asarray(stacked), size)[rank]
            where = (op, arguments, dtype, f"rank {rank} of {size}")  # a rank that gets nothing holds zeros
            assert_equal(got, np.zeros_like(got) if want is None else want, where)


EDGES = {2: [[(0, 1)], [(1, 0)], [(0, 1), (1, 0)]], 4: [[(0, 1), (1, 2), (2, 3)], [(3, 2)], [(0, 2), (2, 0)]]}


@pytest.mark.parametrize(("size", "edges"), [(size, edges) for size in EDGES for edges in EDGES[size]], ids=str)
def test_jax_permute_moves_along_the_edges_and_gives_zeros_elsewhere(size, edges):
    xs = definitions.inputs(size, "float32")
    got = np.split(np.asarray(on_mesh(functools.partial(collectives.permute, axis="x", edges=edges), size, xs)), size)
    for rank, want in enumerate(definitions.permute(xs, edges)):
        assert_equal(got[rank], want, (edges, rank))


@pytest.mark.parametrize("size", SIZES)
def test_torch_collectives_compose(size, pool):
    xs = definitions.inputs(size, "float32")
    for rank, pairs in enumerate(pool.call(on_ranks.compositions, xs, world_size=size)):
        for name, (one, other) in pairs.items():
            assert (one is None) == (other is None), (name, rank)
            if one is not None:
                assert_equal(other[1], one[1], (name, rank))


@pytest.mark.parametrize("size", SIZES)
def test_jax_collectives_compose(size):
    c = collectives

    def pairs(x):
        return {
            "all_reduce": (c.all_reduce(x, "x"), c.all_gather(c.reduce_scatter(x, "x"), "x")),
            "broadcast": (c.broadcast(x, 0, "x"), c.all_gather(c.scatter(x, 0, "x"), "x")),
            "all_gather": (c.all_gather(x, "x"), c.broadcast(c.gather(x, 0, "x"), 0, "x")),
            "reduce": (c.reduce(x, 0, "x"), c.gather(c.reduce_scatter(x, "x"), 0, "x")),
            "all_to_all": (x, c.all_to_all(c.all_to_all(x, "x"), "x")),
        }

    for name, (one, other) in on_mesh(pairs, size, definitions.inputs(size, "float32")).items():
        assert_equal(other, one, name)


def test_the_definitions_compose_too():
    d, xs = definitions, definitions.inputs(4, "float64")
    np.testing.assert_array_equal(d.all_reduce(xs), d.all_gather(d.reduce_scatter(xs)))
    np.testing.assert_array_equal(d.broadcast(xs, 1), d.all_gather(d.scatter(xs, 1)))
    np.testing.assert_array_equal(d.all_gather(xs)[0], d.gather(xs, 0)[0])
    np.testing.assert_array_equal(d.reduce(xs, 2)[2], d.gather(d.reduce_scatter(xs), 2)[2])
    np.testing.assert_array_equal(d.all_to_all(d.all_to_all(xs)), xs)


def vectors(name, size, rest):
    """Every rank's input x and output gradient y of a pair, replicated where it replicates."""
    rng = np.random.default_rng([len(name), size])
    forward, _ = PAIRS[name]
    xs = [rng.standard_normal((8, 4)) for _ in range(size)]
    if name in REPLICATED_INPUT:
        xs = xs[:1] * size
    ys = [rng.standard_normal(out.shape) for out in forward(xs, **rest)]
    return xs, ys[:1] * size if name in REPLICATED_OUTPUT else ys


def inner(name, replicated, one, other):
    """The inner product over all ranks; a replicated array is one array, and counts once."""
    ranks = 1 if name in replicated else len(one)
    return sum(float(np.sum(one[rank] * other[rank])) for rank in range(ranks))


def pair_cases():
    return [
        (name, size, rest) for name in PAIRS for size in SIZES for rest in RESTS.get(name, [{"dim": 0}, {"dim": 1}])
    ]


RESTS = {
    "identity_all_reduce": [{}],
    "all_reduce_identity": [{}],
    "all_to_all_back": [{"split": 0, "concat": 1}, {"split": 1, "concat": 0}],
}


@pytest.mark.parametrize(("name", "size", "rest"), pair_cases(), ids=str)
def test_torch_backward_transposes_forward(name, size, rest, pool):
    xs, ys = vectors(name, size, rest)
    forward, backward = PAIRS[name]
    calls = [(name, rest, xs, ys, strided) for strided in (False, True)]
    for ranks in zip(*pool.call(on_ranks.every, on_ranks.pair, calls, world_size=size), strict=True):
        outs, grads = [out for (_, out), _, _ in ranks], [grad for _, (_, grad), _ in ranks]
        np.testing.assert_allclose(outs, forward(xs, **rest), rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(grads, backward(ys, **rest), rtol=1e-13, atol=1e-14)
        want = inner(name, REPLICATED_OUTPUT, outs, ys)
        assert inner(name, REPLICATED_INPUT, xs, grads) == pytest.approx(want, rel=1e-12)
        assert all(untouched for _, _, untouched in ranks)


JAX_PAIRS = {
    "all_gather_reduce_scatter": collectives.all_gather,
    "reduce_scatter_all_gather": collectives.reduce_scatter,
    "identity_all_reduce": collectives.varying,
    "all_reduce_identity": collectives.all_reduce,
    "all_to_all_back": collectives.all_to_all_dims,
}


IN_JAX = [pytest.param(*case, marks=[pytest.mark.long] if case[1] == 2 else []) for case in pair_cases()]


@pytest.mark.parametrize(("name", "size", "rest"), IN_JAX, ids=str)
def test_jax_transposes_to_the_same_collective(name, size, rest):
    xs, ys = vectors(name, size, rest)
    forward, backward = PAIRS[name]
    mesh = make_mesh(size)
    spec_in, spec_out = (P() if name in kind else P("x") for kind in (REPLICATED_INPUT, REPLICATED_OUTPUT))

    def join(arrays, spec):
        return jnp.asarray(arrays[0] if spec == P() else np.concatenate(arrays))

    def split(array, spec):
        return [np.asarray(array)] * size if spec == P() else np.split(np.asarray(array), size)

    with jax.enable_x64(True):
        f = jax.shard_map(
            lambda x: JAX_PAIRS[name](x, axis="x", **rest), mesh=mesh, in_specs=spec_in, out_specs=spec_out
        )
        both = jax.jit(lambda x, y: (lambda out, back: (out, *back(y)))(*jax.vjp(f, x)))
        out, grad = both(join(xs, spec_in), join(ys, spec_out))
        outs, grads = split(out, spec_out), split(grad, spec_in)
    np.testing.assert_allclose(outs, forward(xs, **rest), rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(grads, backward(ys, **rest), rtol=1e-13, atol=1e-14)
    want = inner(name, REPLICATED_OUTPUT, outs, ys)
    assert inner(name, REPLICATED_INPUT, xs, grads) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("size", (2, 4))
def test_jax_all_to_all_and_permute_transpose_to_their_inverse(size):
    mesh = make_mesh(size)
    xs, ys = definitions.inputs(size, "float32", seed=1), definitions.inputs(size, "float32", seed=2)
    edges = [(rank, rank + 1) for rank in range(size - 1)]

    def both(x):
        return collectives.all_to_all(x, "x"), collectives.permute(x, "x", edges)

    f = jax.shard_map(both, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    x, y, zero = np.concatenate(xs), np.concatenate(ys), np.zeros((8 * size, 4), np.float32)
    transpose = jax.jit(lambda x, y: jax.vjp(f, x)[1](y)[0])
    assert_equal(transpose(x, (y, zero)), np.concatenate(definitions.all_to_all(ys)), "all_to_all")
    inverse = definitions.permute(ys, [(target, source) for source, target in edges])
    assert_equal(transpose(x, (zero, y)), np.concatenate(inverse), "permute")


def test_the_rooted_and_the_other_collectives_are_eight():
    assert len(DEFINITIONS) == 8 and set(ROOTED) < set(DEFINITIONS)
