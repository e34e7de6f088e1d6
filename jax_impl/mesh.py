"""The mesh of a run on devices, and arrays placed on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from contract.strategy import Run


def make_mesh(run: Run, devices: Sequence[Any]) -> Mesh:
    """The axes of a run over `devices`. The compiler, not the type system, propagates shardings (AxisType.Auto)."""
    names, shape = run.mesh.names or ("one",), run.mesh.shape or (1,)
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=list(devices))


def place(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Arrays on the devices of `mesh`, each split as its PartitionSpec says."""
    return jax.device_put(tree, shardings(specs, mesh))


def shardings(specs: Any, mesh: Mesh) -> Any:
    """PartitionSpecs as NamedShardings on a mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
