"""The MLP in flax.nnx with logical axis names on its parameters, and the parts that all strategies share.

A logical axis says what a dim is, not where it is placed; a strategy's rules map it to a mesh axis or to none. Layers
come in pairs as in Megatron's MLP: an even one goes "up" (up_in -> up_out), an odd one goes "down" (down_in ->
down_out).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec

from contract.problem import Batch, Layer, split_slices
from contract.schedule import Parts

LOGICAL_AXES = ("batch", "features", "stage", "up_in", "up_out", "up_bias", "down_in", "down_out", "down_bias")
LOGICAL_AXES += ("gain", "qkv_in", "qkv_out", "o_in", "o_out", "router_in", "router_out")  # of a transformer's blocks
LOGICAL_AXES += ("expert", "expert_up_in", "expert_up_out", "expert_down_in", "expert_down_out")

KINDS = ("up", "down")  # of even and of odd layers
STREAM = ("batch", ("product_sequence", "sequence"))  # the first dims of a transformer's residual stream
Constrain = Callable[..., Array]  # (array, the names of its dims, weight=None) -> the same array


def as_it_is(x: Array, *names: Any, weight: str | None = None) -> Array:
    """States nothing. weight: of an activation None, of a weight whether it is "stored" so or "used"."""
    return x


class Linear(nnx.Module):
    """w[in, out] and b[out], with a leading dim of stages in a pipeline."""

    def __init__(self, layer: Layer, kind: str):
        self.kind, stage = kind, ("stage",) if layer.w.ndim == 3 else ()
        self.w = nnx.Param(layer.w, out_sharding=(*stage, f"{kind}_in", f"{kind}_out"), eager_sharding=False)
        self.b = nnx.Param(layer.b, out_sharding=(*stage, f"{kind}_bias"), eager_sharding=False)

    def __call__(self, x: Array, constrain: Constrain) -> Array:
        """Y[B, F] = X[B, D] @ W[D, F]."""
        return product(x, self.w[...], constrain, (f"{self.kind}_in", f"{self.kind}_out")) + self.b[...]


class MLP(nnx.Module):
    """x = gelu(x @ w + b) for every layer, on given parameters, because all implementations start from the same."""

    def __init__(self, params: list[Layer]):
        self.layers = nnx.List([Linear(layer, KINDS[i % 2]) for i, layer in enumerate(params)])

    def __call__(self, x: Array, constrain: Constrain = as_it_is) -> Array:
        """constrain: states how an array is split, by the names of its dims."""
        for i, layer in enumerate(self.layers):
            x = constrain(gelu(layer(x, constrain)), "batch", f"{KINDS[i % 2]}_out")
        return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product(x: Array, w: Array, constrain: Constrain = as_it_is, names: tuple[Any, ...] = ()) -> Array:
    """Y[..., F...] = X[..., D] @ W[D, F...], whose backward pass computes dW[D, F...] = X^T @ dY.

    JAX's own rule transposes dY^T @ X. Where samples are split, the partitioner puts the derived all_reduce between the
    two, and XLA then cannot fold the transpose into the product: on the CPU the sum is column-major, and the update
    that reads it beside row-major parameters takes ten times as long.

    constrain, names: state how W is split in either pass, where it is stored in smaller parts. W is kept as it is
    stored, and of its gradient nothing is stated: JAX's own rule would state that it is split as W is in use, so that
    all of it would be reduced.
    """
    return lax.dot_general(x, constrain(w, *names, weight="used"), (((x.ndim - 1,), (0,)), ((), ())))


def _product(x: Array, w: Array, constrain: Constrain, names: tuple[Any, ...]) -> tuple[Array, tuple[Array, Array]]:
    return product(x, w, constrain, names), (x, w)


def _product_back(
    constrain: Constrain, names: tuple[Any, ...], kept: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    x, w = kept
    w = constrain(w, *names, weight="stored")
    rows, features = tuple(range(x.ndim - 1)), tuple(range(x.ndim - 1, dy.ndim))
    dx = lax.dot_general(dy, constrain(w, *names, weight="used"), ((features, tuple(range(1, w.ndim))), ((), ())))
    return dx, lax.dot_general(x, dy, ((rows, rows), ((), ())))


product.defvjp(_product, _product_back)


def gelu(x: Array) -> Array:
    """z Phi(z), computed by erf, not by tanh. Any shape, elementwise."""
    return jax.nn.gelu(x, approximate=False)


def squared_error(out: Array, batch: Batch) -> Array:
    """sum(weight * (out - y)^2), a scalar in the weight's dtype: the part of the global mean that `out` contributes."""
    residual = (out - batch.y).astype(batch.weight.dtype)
    return jnp.sum(batch.weight * jnp.square(residual))


def forward(params: Iterable[Layer], x: Array) -> Array:
    """The layers as a single device computes them, for every strategy that does not cut inside a layer."""
    for w, b in params:
        x = gelu(x @ w + b)  # Y[B, F] = X[B, D] @ W[D, F]
    return x


def annotation_specs(
    module: Callable[[list[Any]], nnx.Module], shapes: list[Any], rules: Mapping[str, Any], stages: int | None = None
) -> list[Any]:
    """The PartitionSpec of every parameter, from its logical axis names and `rules`. Axes without a rule are not split.

    module: made of parameters of these shapes. stages: of a pipeline, over which every parameter is stacked.
    """
    every = tuple((name, rules.get(name)) for name in LOGICAL_AXES)
    stack = () if stages is None else (stages,)
    arrays = [layer._make(jax.ShapeDtypeStruct((*stack, *shape), jnp.float32) for shape in layer) for layer in shapes]
    model = nnx.eval_shape(module, arrays)
    with nnx.logical_axis_rules(every):
        specs: Any = nnx.get_partition_spec(nnx.state(model))
    return [
        layer._make(specs["layers"][i][name].get_value() for name in layer._fields) for i, layer in enumerate(shapes)
    ]


def split_by(rules: Mapping[str, Any], names: str | tuple[str, ...] | None) -> Any:
    """What splits a dim with this name, or with several names, of which the first cuts first: an entry of a spec."""
    found: list[str] = []
    for name in (names,) if isinstance(names, str) else names or ():
        axes = rules.get(name) or ()
        found += (axes,) if isinstance(axes, str) else axes
    return tuple(found) if len(found) > 1 else found[0] if found else None


def batch_annotations(rules: Mapping[str, Any], blocks: bool = False) -> Batch:
    """The PartitionSpecs of x[batch, up_in], y[batch, features] and weight[batch, 1].

    blocks: of a transformer, whose batch is [batch, sequence, features].
    """
    rows = [split_by(rules, name) for name in (STREAM if blocks else STREAM[:1])]
    return Batch(PartitionSpec(*rows), PartitionSpec(*rows, rules.get("features")), PartitionSpec(*rows))


def stack_stages(params: list[Any], places: Parts, unit: int = 1) -> list[Any]:
    """Layer j of chunk c of all stages, stacked: w[D, D] -> w[stages, D, D], for all j of c = 0, then c = 1, ...

    places: the (stage, chunk) of every part of the model. unit: how many layers stay together. There are as many j as
    the longest part has layers; a shorter one is padded with zeros, and `is_layer` tells these from layers.
    """
    split = [params[s.start * unit : s.stop * unit] for s in split_slices(len(params) // unit, len(places))]
    longest, zeros = len(split[0]), [layer._make(map(np.zeros_like, layer)) for layer in split[0]]
    chunks: dict[int, list[list[Any]]] = {}  # chunk -> the parts of all stages
    for (_, chunk), part in sorted(zip(places, split, strict=True), key=lambda one: one[0]):
        chunks.setdefault(chunk, []).append(part)
    return [
        zeros[j]._make(map(np.stack, zip(*(part[j] if j < len(part) else zeros[j] for part in parts), strict=True)))
        for _, parts in sorted(chunks.items())
        for j in range(longest)
    ]


def is_layer(num_layers: int, places: Parts) -> np.ndarray:
    """[stages, chunks, longest] bool: whether a chunk of a stage has a layer j."""
    sizes = np.zeros((max(stage for stage, _ in places) + 1, max(chunk for _, chunk in places) + 1), int)
    for (stage, chunk), piece in zip(places, split_slices(num_layers, len(places)), strict=True):
        sizes[stage, chunk] = piece.stop - piece.start
    return np.arange(sizes.max()) < sizes[..., None]
