"""`shardiff.mesh("v5e:4x4", dp=4, tp=4)`: a jax.sharding.Mesh of devices that need not be here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardiff.compiling import devices
from shardiff.compiling.hardware import Target, parse
from shardiff.mesh import Mesh
from shardiff.mesh import parse as parse_mesh
from shardiff.system.extras import require

if TYPE_CHECKING:
    import jax

REST = -1  # the size of the one axis that takes all devices that the others leave


def mesh(target: str, axis_types: Any = None, **axes: int) -> jax.sharding.Mesh:
    """A mesh of the devices of `target` to lower and compile for. No hardware is needed, and no array can be put there.

    target: "cpu:8", "h100:8" (GPUs of one host), "h100:2x8" (hosts x GPUs), "v5e:4x4" (chips of a TPU slice), ...:
    `shardiff targets` lists them. axes: name=size, outermost first; one size may be -1, which takes what the others
    leave. Fewer devices than the target has may be used. axis_types: as for jax.sharding.Mesh; all Auto by default.

    The devices of this process stay as they are, whether jax has started or not. Raises ValueError, one line, for a
    target or axes that cannot be.
    """
    require("shardiff.mesh", "jax")
    where = parse(target)
    return on(where, sized(axes, where), axis_types)


def sized(axes: Mapping[str, int], target: Target) -> Mesh:
    """The axes with their sizes on this target: -1 takes what the others leave. Raises ValueError."""
    text = ",".join(f"{name}={size}" for name, size in axes.items())
    if not axes:
        raise ValueError(f"a mesh needs at least one axis, such as dp={target.num_devices}")
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != REST):
            raise ValueError(f"axis {name} must have at least 1 rank, or -1 for all that is left; got {size!r}")
    rest = [name for name, size in axes.items() if size == REST]
    if len(rest) > 1:
        raise ValueError(f"only one axis can take what is left, and {' and '.join(rest)} both have -1")
    fixed, available = math.prod(size for size in axes.values() if size != REST), target.num_devices
    if fixed > available:
        raise ValueError(f"the mesh {text} needs {fixed} devices, {target} has {available}")
    if rest and available % fixed:
        raise ValueError(f"the mesh {text} leaves no whole number of the {available} devices of {target} to {rest[0]}")
    return Mesh(tuple((name, available // fixed if size == REST else size) for name, size in axes.items()))


def on(target: Target, ranks: Mesh, axis_types: Any = None) -> jax.sharding.Mesh:
    """The first devices of the target as a mesh of these axes."""
    import jax
    import numpy as np
    from jax.experimental.mesh_utils import create_device_mesh

    found = devices.get(target)[: ranks.size]
    if target.kind == "tpu" and ranks.size == target.num_devices:  # axes along the links of the slice, as on hardware
        placed = create_device_mesh(ranks.shape, found, allow_split_physical_axes=True)
    else:
        placed = np.array(found).reshape(ranks.shape)
    return jax.sharding.Mesh(placed, ranks.names, axis_types=axis_types)


def parse_axes(text: str) -> dict[str, int]:
    """`dp=-1,tp=4` as axes. Raises ValueError, one line."""
    sizes = dict(parse_mesh(text.replace("=-1", "=1")).axes)
    return {name: REST if f"{name}=-1" in text.split(",") else size for name, size in sizes.items()}
