"""Which ranks of a run are simulated, and where they lie on the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from contract.strategy import Run
from shardiff.cost import Group, Network


@dataclass(frozen=True)
class Place:
    """Where one simulated rank is. host: of the ranks that it stands for. groups: axis -> its group. many: how many
    ranks of its host it stands for. peers: axis -> the simulated ranks of its group; without them it stands for all of
    its group, but along a pipeline, where all that are simulated are one."""

    host: int
    groups: Mapping[str, Group]
    many: float = 1.0
    peers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """The simulated ranks: rank 0, in a pipeline a rank of each stage, or everyone."""

    ranks: tuple[int, ...]
    places: tuple[Place, ...]


def placement(run: Run, network: Network) -> Placement:
    """Ranks fill one host after the other. Raises ValueError unless the mesh fills the network."""
    if run.world_size != network.size:
        size = f"{network.hosts} x {network.devices}"
        raise ValueError(f"the mesh {run.mesh} has {run.world_size} ranks, and there are {size} devices")
    return _placement(run.mesh.axes, network.devices)


def everyone(run: Run, network: Network) -> Placement:
    """Every rank as itself. Raises ValueError unless the mesh fills the network."""
    placed = placement(run, network)
    peers: list[dict[str, tuple[int, ...]]] = [{} for _ in range(run.world_size)]
    for name in run.mesh.names:
        for group in run.mesh.groups(name):
            for rank in group:
                peers[rank][name] = tuple(group)
    groups = {
        name: replace(group, shared=max(1, network.devices // group.per_host))
        for name, group in placed.places[0].groups.items()
    }
    places = (Place(rank // network.devices, groups, 1.0, mine) for rank, mine in enumerate(peers))
    return Placement(tuple(range(run.world_size)), tuple(places))


@lru_cache(4096)
def _placement(axes: tuple[tuple[str, int], ...], devices: int) -> Placement:
    strides, stride = {}, 1
    for name, size in reversed(axes):
        strides[name] = stride
        stride *= size
    stages, apart = dict(axes).get("pp", 1), strides.get("pp", 1)
    many = devices / spread(stages, apart, devices).per_host
    groups = {}
    for name, size in axes:
        group = spread(size, strides[name], devices)
        groups[name] = Group(group.size, group.hosts, max(1, round(many / group.per_host)))
    ranks = tuple(stage * apart for stage in range(stages))
    return Placement(ranks, tuple(Place(rank // devices, groups, many) for rank in ranks))


@lru_cache(4096)
def spread(size: int, stride: int, devices: int) -> Group:
    """The group of ranks 0, stride, 2 stride, ... on hosts of so many devices."""
    return Group(size, len({i * stride // devices for i in range(size)}) if size * stride > devices else 1)
