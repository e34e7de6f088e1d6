"""`shardiff.abstract(model, mesh)`: the shapes of arrays with their shardings, so that nothing need be allocated."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from shardiff.system.extras import require

if TYPE_CHECKING:
    import jax

Axis = str | tuple[str, ...] | None


def abstract(
    tree: Any,
    mesh: jax.sharding.Mesh,
    specs: Any = None,
    rules: Mapping[str, Axis] | None = None,
) -> Any:
    """The same tree with a jax.ShapeDtypeStruct, sharded on `mesh`, for every array: what `lower` takes.

    tree: a flax.nnx module or state, flax.linen variables, an equinox module or any pytree, of arrays or of shapes; or
    a function without parameters that makes one, such as `lambda: Model(nnx.Rngs(0))`, which is traced and not run.

    specs: a PartitionSpec for every array: as a tree that is a prefix of `tree` (None: replicated), or as a function of
    the path (`jax.tree_util.keystr`) and the array. By default what the tree itself says: the metadata of flax.nnx
    variables and of flax.linen boxes, else the shardings of its arrays, else replicated.

    rules: logical axis name -> axis of the mesh, several, or None. Names without a rule are axes of the mesh. Where no
    rules are given, a function is traced in the mesh's context (`jax.set_mesh`).

    Raises ValueError, one line that names the array: for an axis that the mesh does not have, or a dim that it does not
    divide.
    """
    require("shardiff.abstract", "jax")
    import jax

    if inspect.isroutine(tree) or isinstance(tree, functools.partial):
        tree = _evaluated(tree, None if rules else mesh)
    said = _from_metadata(tree) if specs is None else None
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    if specs is None:
        of_leaf = [_spec_of(leaf) for _, leaf in leaves] if said is None else _flat(said, structure)
    elif callable(specs) and not isinstance(specs, jax.sharding.PartitionSpec):
        of_leaf = [specs(jax.tree_util.keystr(path), leaf) if _is_array(leaf) else None for path, leaf in leaves]
    else:
        of_leaf = _flat(_broadcast(specs, tree), structure)
    placed = [
        _placed(jax.tree_util.keystr(path), leaf, spec, mesh, rules or {})
        for (path, leaf), spec in zip(leaves, of_leaf, strict=True)
    ]
    return jax.tree.unflatten(structure, placed)


def _evaluated(make: Callable[[], Any], mesh: jax.sharding.Mesh | None) -> Any:
    """The shapes of what the function makes. mesh: for the axes that it names; None where it names logical ones.

    flax.nnx places a variable that has a sharding when it makes it, unless it is told not to.
    """
    import jax

    nnx = sys.modules.get("flax.nnx")
    eval_shape = nnx.eval_shape if nnx else jax.eval_shape
    if mesh is not None:
        with jax.set_mesh(mesh):
            return eval_shape(make)
    with nnx.use_eager_sharding(False) if hasattr(nnx, "use_eager_sharding") else nullcontext():  # type: ignore
        return eval_shape(make)


def _from_metadata(tree: Any) -> Any:
    """The specs that flax's variables and boxes carry, where the tree has any; else None."""
    import jax

    for module, kinds in (("flax.nnx", ("Variable",)), ("flax.linen", ("Partitioned",))):
        if (flax := sys.modules.get(module)) is None:
            continue
        boxes = tuple(getattr(flax, kind) for kind in kinds)
        found = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, boxes))  # noqa: B023
        if any(isinstance(leaf, boxes) for leaf in found):
            return flax.get_partition_spec(tree)
    return None


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _spec_of(leaf: Any) -> Any:
    return getattr(getattr(leaf, "sharding", None), "spec", None)


def _is_spec(node: Any) -> bool:
    import jax

    return node is None or isinstance(node, jax.sharding.PartitionSpec)


def _flat(specs: Any, structure: Any) -> list[Any]:
    """The specs of a tree, in the order of its leaves."""
    import jax

    flat = jax.tree.leaves(specs, is_leaf=_is_spec)
    if len(flat) != structure.num_leaves:
        raise ValueError(f"{len(flat)} specs for {structure.num_leaves} arrays; give a tree that is a prefix of theirs")
    return flat


def _broadcast(specs: Any, tree: Any) -> Any:
    import jax

    def under(spec: Any, part: Any) -> Any:
        return jax.tree.map(lambda _: spec, part)

    try:
        return jax.tree.map(under, specs, tree, is_leaf=_is_spec)
    except (ValueError, TypeError):
        raise ValueError("specs must be a prefix of the arrays' tree, with a PartitionSpec or None as leaves") from None


def _placed(path: str, leaf: Any, spec: Any, mesh: jax.sharding.Mesh, rules: Mapping[str, Axis]) -> Any:
    import jax

    if not _is_array(leaf):
        return leaf
    spec = jax.sharding.PartitionSpec(*(_renamed(entry, rules) for entry in spec or ()))
    if len(spec) > len(leaf.shape):
        raise ValueError(f"{path or 'the array'} has {len(leaf.shape)} dims, its spec {spec} has {len(spec)}")
    sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    for dim, entry in enumerate(spec):
        axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        for axis in axes:
            if isinstance(axis, str) and axis not in sizes:
                raise ValueError(
                    f"{path or 'the array'} is sharded along {axis!r}, and the mesh has the axes "
                    f"{', '.join(map(str, sizes))}; rules={{{axis!r}: ...}} names the axis that is meant"
                )
        ranks = math.prod(sizes.get(axis, 1) for axis in axes)
        if leaf.shape[dim] % ranks:
            raise ValueError(
                f"{path or 'the array'} has the shape {tuple(leaf.shape)}: dim {dim} cannot be split evenly among the "
                f"{ranks} ranks of {entry!r}"
            )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))


def _renamed(entry: Any, rules: Mapping[str, Axis]) -> Any:
    """One dim's entry of a spec, by the rules: a name may stand for several axes, or for none."""
    if isinstance(entry, str):
        return rules.get(entry, entry)
    if not isinstance(entry, tuple):
        return entry
    axes: list[str] = []
    for name in entry:
        found = rules.get(name, name)
        axes += found if isinstance(found, tuple) else () if found is None else (found,)
    return tuple(axes) or None
