"""Ranks on named axes, and which axis a collective runs along. The axis is derived from groups, never stamped.

A mesh lists its axes outermost first; ranks are numbered in row-major order, as in torch's `init_device_mesh` and
`jax.make_mesh`: on `dp=2,tp=4` the ranks 0 to 3 are one tp group, and 0 and 4 one dp group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardiff.record import Record

MOST_RANKS = 65_536  # a mesh lists its groups of ranks
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Mesh:
    """axes: (name, size) of every axis, outermost first. No axes: a single rank."""

    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if size < 1:
                raise ValueError(f"axis {name} must have at least 1 rank, got {size}")
            if names.count(name) > 1:
                raise ValueError(f"axis {name} is named twice")

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes) or "1"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(np.prod(self.shape, dtype=np.int64))

    def size_of(self, *names: str) -> int:
        """The number of ranks along these axes together; an axis that the mesh does not have counts as 1."""
        return int(np.prod([size for name, size in self.axes if name in names], dtype=np.int64))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> where the rank lies on it."""
        found, left = [], rank
        for name, size in reversed(self.axes):
            left, at = divmod(left, size)
            found.append((name, at))
        if left:
            raise ValueError(f"rank {rank} is not in the mesh {self}")
        return dict(reversed(found))

    def groups(self, *names: str) -> Groups:
        """Every group of ranks that differ along these axes alone; `groups("tp")`, or `groups("dp", "tp")` for both."""
        for name in names:
            if name not in self.names:
                raise ValueError(f"no axis {name} in the mesh {self}")
        inside = [i for i, name in enumerate(self.names) if name in names]
        outside = [i for i in range(len(self.axes)) if i not in inside]
        ranks = np.arange(self.size).reshape(self.shape).transpose(*outside, *inside)
        return tuple(tuple(map(int, group)) for group in ranks.reshape(-1, self.size_of(*names)))

    def group_of(self, rank: int, *names: str) -> tuple[int, ...]:
        """The ranks that share all coordinates of `rank` but those along these axes."""
        return next(group for group in self.groups(*names) if rank in group)

    @cached_property
    def _axis_of_groups(self) -> dict[frozenset[frozenset[int]], str]:
        """Every combination of axes that the groups of a collective may run along; the one with fewest axes wins."""
        found: dict[frozenset[frozenset[int]], str] = {}
        for bits in sorted(range(1, 2 ** len(self.axes)), key=int.bit_count):
            names = [name for i, name in enumerate(self.names) if bits >> i & 1]
            found.setdefault(frozenset(map(frozenset, self.groups(*names))), ",".join(names))
        return found

    def axis_of(self, record: Record) -> str | None:
        """The axis that a record runs along: "tp", "dp,tp" for a product of axes, None where its groups are neither.

        A record of some groups of an axis runs along that axis too. A permute runs along the one axis that all its
        edges step along.
        """
        if record.edges:
            steps = set()
            for source, target in record.edges:
                if not (0 <= source < self.size and 0 <= target < self.size):
                    return None
                here, there = self.coordinates(source), self.coordinates(target)
                steps.add(",".join(name for name in self.names if here[name] != there[name]))
            return steps.pop() or None if len(steps) == 1 else None
        if not record.groups:
            return None
        wanted = frozenset(map(frozenset, record.groups))
        if all(len(group) == 1 for group in wanted):
            return None
        if (exact := self._axis_of_groups.get(wanted)) is not None:
            return exact
        return next((name for groups, name in self._axis_of_groups.items() if wanted <= groups), None)

    def named(self, records: Sequence[Record]) -> list[Record]:
        """The records with the axes that their groups and edges run along."""
        return [replace(record, axis=self.axis_of(record)) for record in records]


def parse(text: str) -> Mesh:
    """`dp=2,tp=4` as a Mesh. Raises ValueError, one line: what is wrong and what would be right."""
    if not re.fullmatch(r"[A-Za-z_]\w*=[0-9]{1,9}(,[A-Za-z_]\w*=[0-9]{1,9})*", text):
        raise ValueError(f"a mesh is AXIS=RANKS for each axis, outermost first, such as dp=2,tp=4; got {text!r}")
    mesh = Mesh(tuple((name, int(size)) for name, _, size in (part.partition("=") for part in text.split(","))))
    if math.prod(mesh.shape) > MOST_RANKS:
        raise ValueError(f"a mesh has at most {MOST_RANKS:,} ranks, {text} has {math.prod(mesh.shape):,}")
    return mesh
