"""The mesh as a strategy sees it. A strategy asks for group, rank and size by the name of an axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from contract.layout import schedule_of, unit_of
from contract.schedule import Schedule
from contract.strategy import Run


@dataclass(frozen=True)
class Mesh:
    """groups: axis -> the process group of this rank along it. unit: how many layers a pipeline must keep together.

    schedule: of the pipeline, which says where the parts of the model live.
    """

    groups: Mapping[str, ProcessGroup]
    unit: int = 1
    schedule: Schedule | None = None

    def group(self, axis: str) -> ProcessGroup:
        """This rank and the ranks that differ from it along this axis alone."""
        return self.groups[axis]

    def rank(self, axis: str) -> int:
        """This rank's position on the axis."""
        return self.groups[axis].rank()

    def size(self, axis: str) -> int:
        """The number of ranks along the axis."""
        return self.groups[axis].size()

    def split(self, layer: Any, dims: Any, axis: str) -> Any:
        """This rank's share along `axis` of one dim of each parameter of a layer; None leaves a parameter whole."""
        rank, n = self.rank(axis), self.size(axis)
        return layer._make(p if d is None else p.chunk(n, d)[rank] for p, d in zip(layer, dims, strict=True))


def make_mesh(run: Run, device: torch.device) -> Mesh:
    """The mesh of a run, over all ranks of the default process group. Every rank must call it."""
    return of_device_mesh(make_device_mesh(run, device), run)


def make_device_mesh(run: Run, device: torch.device) -> DeviceMesh:
    """The axes of a run as a torch DeviceMesh."""
    return init_device_mesh(device.type, run.mesh.shape or (1,), mesh_dim_names=run.mesh.names or ("one",))


def of_device_mesh(device_mesh: DeviceMesh, run: Run) -> Mesh:
    """The mesh of a run on a DeviceMesh with the same axes."""
    groups = {name: device_mesh.get_group(name) for name in run.mesh.names}
    return Mesh(groups, unit_of(run), schedule_of(run))
