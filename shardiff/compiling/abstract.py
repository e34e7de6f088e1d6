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

BOXES = (("flax.nnx", "Variable"), ("flax.linen", "Partitioned"))  # what carries an array's axis names
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
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    if specs is None:
        of_leaf = _said(tree)
    elif callable(specs) and not isinstance(specs, jax.sharding.PartitionSpec):
        of_leaf = [specs(jax.tree_util.keystr(path), leaf) if _is_array(leaf) else None for path, leaf in leaves]
    else:
        of_leaf = _broadcast(specs, tree)
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
    eager = getattr(nnx, "use_eager_sharding", None)
    with eager(False) if eager else nullcontext():
        return eval_shape(make)


def _said(tree: Any) -> list[Any]:
    """What the tree says of each of its leaves: flax's variables and boxes by their metadata, arrays by theirs."""
    import jax

    flax = [(sys.modules[name], kind) for name, kind in BOXES if name in sys.modules]
    kinds = {getattr(module, kind): module.get_partition_spec for module, kind in flax}
    boxes = tuple(kinds)
    specs = []
    for leaf in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, boxes)):
        get = next((get for kind, get in kinds.items() if isinstance(leaf, kind)), None)
        if get is None:
            specs.append(getattr(getattr(leaf, "sharding", None), "spec", None))
        else:
            said = [spec for spec in jax.tree.leaves(get(leaf), is_leaf=_is_spec) if spec is not None]
            specs += [said[0] if said else None for _ in jax.tree.leaves(leaf)]
    return specs


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_spec(node: Any) -> bool:
    import jax

    return node is None or isinstance(node, jax.sharding.PartitionSpec)


def _broadcast(specs: Any, tree: Any) -> list[Any]:
    """The specs of a tree of which `specs` is a prefix, in the order of its leaves."""
    import jax

    found: list[Any] = []

    def under(spec: Any, part: Any) -> None:
        found.extend(spec for _ in jax.tree.leaves(part))

    try:
        jax.tree.map(under, specs, tree, is_leaf=_is_spec)
    except (ValueError, TypeError):
        raise ValueError("specs must be a prefix of the arrays' tree, with a PartitionSpec or None as leaves") from None
    return found


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
