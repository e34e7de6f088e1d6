"""`shardiff.abstract`: shapes of arrays, with shardings from a model's metadata or from given specs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardiff

SPECS = {"up": P(None, "tp"), "down": P("tp", None)}


@pytest.fixture(scope="module")
def mesh() -> Any:
    return shardiff.mesh("cpu:8", dp=4, tp=2)


class Model(nnx.Module):
    """Columns, then rows: the names are the mesh's axes, or logical ones."""

    def __init__(self, rngs: nnx.Rngs, split: str | None = "tp") -> None:
        init = nnx.initializers.lecun_normal()
        annotate = (lambda *names: nnx.with_partitioning(init, names)) if split else lambda *names: init
        self.up = nnx.Linear(8, 16, kernel_init=annotate(None, split), rngs=rngs)
        self.down = nnx.Linear(16, 8, kernel_init=annotate(split, None), rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.relu(self.up(x)))


def kernels(model: Any) -> dict[str, Any]:
    return {"up": model.up.kernel.get_value().sharding.spec, "down": model.down.kernel.get_value().sharding.spec}


def batch(mesh: Any) -> Any:
    return jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("dp", None)))


def test_an_nnx_module_comes_back_as_one_whose_arrays_are_shapes(mesh):
    model = shardiff.abstract(lambda: Model(nnx.Rngs(0)), mesh)
    assert isinstance(model, Model) and kernels(model) == SPECS
    assert {type(leaf) for leaf in jax.tree.leaves(model)} == {jax.ShapeDtypeStruct}
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(model)} == {mesh}
    bias, rngs = model.up.bias, model.dropout.rngs
    assert bias is not None and bias.get_value().sharding == NamedSharding(mesh, P())
    assert rngs is not None and rngs.key.get_value().dtype.name.startswith("key")


def test_logical_names_become_axes_by_rules(mesh):
    def make() -> Model:
        return Model(nnx.Rngs(0), "mlp")

    assert kernels(shardiff.abstract(make, mesh, rules={"mlp": "tp"})) == SPECS
    assert kernels(shardiff.abstract(make, mesh, rules={"mlp": None}))["up"] == P(None, None)
    assert kernels(shardiff.abstract(make, mesh, rules={"mlp": ("dp", "tp")}))["up"] == P(None, ("dp", "tp"))


def test_the_whole_step_of_nnx_and_optax_is_lowered_without_an_array(mesh):
    """jax.jit with a state, nnx.jit with a module, and an optimizer's moments sharded as their parameters."""

    def gradient(model: Any, x: Any) -> Any:
        return nnx.grad(lambda model: (model(x) ** 2).mean())(model)

    model = shardiff.abstract(lambda: Model(nnx.Rngs(0)), mesh)
    program = shardiff.compile(nnx.jit(gradient), model, batch(mesh))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    by_state = shardiff.compile(lambda p, r, x: gradient(nnx.merge(graph, p, r), x), params, rest, batch(mesh))
    assert program.counts() == by_state.counts() == {"all_reduce": 2}
    assert {r.axis for r in program} == {"dp", "tp"}
    optimizer = shardiff.abstract(lambda: nnx.Optimizer(Model(nnx.Rngs(0)), optax.adamw(1e-3), wrt=nnx.Param), mesh)
    split = [leaf.sharding.spec for leaf in jax.tree.leaves(optimizer) if leaf.ndim == 2]
    assert sorted(map(str, split)) == sorted(map(str, [*SPECS.values()] * 2))


def test_linen_s_boxes_say_it_too(mesh):
    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
            return linen.Dense(16, kernel_init=init)(x)

    make = functools.partial(Dense().init, jax.random.key(0), jnp.ones((8, 8)))
    variables = shardiff.abstract(make, mesh, rules={"model": "tp"})
    dense = variables["params"]["Dense_0"]
    assert dense["kernel"].value.sharding.spec == P(None, "tp") and dense["bias"].sharding.spec == P()
    layer: Any = Dense()
    program = shardiff.compile(lambda v, x: layer.apply(v, x).sum(), variables, batch(mesh))
    assert {r.axis for r in program} == {"dp", "tp"}


def test_specs_of_a_pytree_are_a_prefix_or_a_function_of_the_path(mesh):
    tree = {"a": jnp.ones((8, 8)), "b": [3.0, jnp.ones(4), len]}
    for specs in ({"a": P("dp"), "b": None}, lambda path, leaf: P("dp") if "a" in path else P()):
        found = shardiff.abstract(tree, mesh, specs)
        assert found["a"].sharding == NamedSharding(mesh, P("dp"))
        assert found["b"][0] == 3.0 and found["b"][1].sharding.spec == P() and found["b"][2] is len
    placed = jax.device_put(jnp.ones((4, 4)), NamedSharding(jax.make_mesh((2,), ("tp",)), P("tp")))
    assert shardiff.abstract(placed, mesh).sharding == NamedSharding(mesh, P("tp"))  # as it is here, on another mesh


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"specs": P("model")},
            "['a'] is sharded along 'model', and the mesh has the axes dp, tp; rules={'model': ...}",
        ),
        ({"specs": P("dp")}, "['a'] has the shape (6, 8): dim 0 cannot be split evenly among the 4 ranks of 'dp'"),
        ({"specs": P(None, None, "tp")}, "['a'] has 2 dims, its spec "),
        ({"specs": {"c": P()}}, "specs must be a prefix of the arrays' tree"),
        ({"specs": P("logical"), "rules": {"logical": ("dp", "tp")}}, "among the 8 ranks of ('dp', 'tp')"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_that_names_the_array(mesh, arguments, words):
    with pytest.raises(ValueError) as refusal:
        shardiff.abstract({"a": jnp.ones((6, 8))}, mesh, **arguments)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
