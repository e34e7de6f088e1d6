"""Which devices an HLO collective connects: every syntax of replica groups, every meaning of the ids in them.

Syntaxes: `{{0,1},{2,3}}`; `[2,4]<=[4,2]T(1,0)`, an iota that is reshaped, transposed and cut into 2 groups of 4;
`mesh['x'=2,'y'=4] {'y'}`, the devices of a mesh that differ in y only, where `'x':(1)2` is a part of an axis and
`device_ids=(...)` the order of the devices in the mesh; `{}`, everyone. Meanings (xla/service/collective_ops_utils.h,
CollectiveOpGroupMode): an id is a replica, a partition, or the two flattened, replica * num_partitions + partition,
and flattened ids are what comes out of here.
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import prod

import numpy as np

from shardiff.hlo.errors import HloError, shown
from shardiff.hlo.instruction import split

Groups = tuple[tuple[int, ...], ...]

MAX_IDS = 2**18  # groups with more ids in total are not listed; their size is still known
IOTA = re.compile(r"\[([\d,\s]*)\]\s*(?:<=\s*\[([\d,\s]*)\])?\s*(?:T\(([\d,\s]*)\))?")
MESH = re.compile(r"mesh\s*\[([^\]]*)\]\s*(?:,\s*device_ids=\s*\((.*)\))?\s*\{([^}]*)\}", re.S)
MESH_AXIS = re.compile(r"\s*['\"](.*)['\"]\s*=\s*(\d{1,9})\s*", re.S)
MESH_PART = re.compile(r"\s*['\"](.*)['\"]\s*(?::\s*\((\d{1,9})\)\s*(\d{1,9}))?\s*", re.S)


@lru_cache(maxsize=256)
def device_groups(value: str, mode: str, replicas: int, partitions: int) -> tuple[Groups | None, int]:
    """(groups of flattened ids, size of the largest). Groups are None where they are too many to list.

    mode: cross_replica, cross_partition, cross_replica_and_partition or flattened_id. Raises HloError.
    """
    listed, size = parse_groups(value)
    if listed == ():
        everyone = {"cross_replica": replicas, "cross_partition": partitions}.get(mode, replicas * partitions)
        if mode == "cross_replica_and_partition":
            everyone = replicas
        size = everyone
        listed = (tuple(range(everyone)),) if everyone <= MAX_IDS else None
    scope = replicas if mode.startswith("cross_replica") else partitions
    if mode != "flattened_id" and listed is not None and max(map(max, listed)) >= scope:
        mode = "flattened_id"  # such ids can be no replicas (no partitions): the text has not told its device counts
    if mode == "cross_replica_and_partition":
        size *= partitions
    if listed is None or size * len(listed) * copies(mode, replicas, partitions) > MAX_IDS:
        return None, size
    return spread(listed, mode, replicas, partitions), size


def spread(groups: Groups, mode: str, replicas: int, partitions: int) -> Groups:
    """Groups of replicas or partitions as groups of flattened ids."""
    if mode == "cross_replica":
        return tuple(tuple(r * partitions + p for r in group) for group in groups for p in range(partitions))
    if mode == "cross_partition":
        return tuple(tuple(r * partitions + p for p in group) for group in groups for r in range(replicas))
    if mode == "cross_replica_and_partition":
        return tuple(tuple(r * partitions + p for r in group for p in range(partitions)) for group in groups)
    return groups


def copies(mode: str, replicas: int, partitions: int) -> int:
    """How many groups `spread` makes of one."""
    return {"cross_replica": partitions, "cross_partition": replicas}.get(mode, 1)


def parse_groups(value: str) -> tuple[Groups | None, int]:
    """(the groups as written, size of the largest): () and 0 for everyone, None where they are too many to list."""
    value = value.strip()
    if value.startswith("{"):
        listed = id_lists(value)
        listed = tuple(group for group in listed if group)
        return listed, max(map(len, listed), default=0)
    if found := IOTA.fullmatch(value):
        shape = integers(found[1])
        if len(shape) != 2 or 0 in shape:
            raise HloError(f"replica groups {shown(value)!r}: expected [groups,size]<=[...]")
        ids = iota(integers(found[2] or found[1]), found[3], prod(shape), value)
        return (None if ids is None else rows(ids.reshape(shape))), shape[1]
    if found := MESH.fullmatch(value):
        return mesh_groups(value, found[1], found[2], found[3])
    raise HloError(f"replica groups {shown(value)!r} cannot be read")


def id_lists(value: str) -> Groups:
    """`{{0,1},{2,3}}` as tuples. Negative ids are padding and are left out."""
    lists = re.findall(r"\{([^{}]*)\}", value.strip()[1:-1])
    if not re.fullmatch(r"[{}\d,\s\-]*", value):
        raise HloError(f"device ids {shown(value)!r} cannot be read")
    return tuple(tuple(number for number in integers(ids) if number >= 0) for ids in lists)


def integers(text: str) -> list[int]:
    """`1, 2,3` as numbers."""
    found = [number.strip() for number in text.split(",") if number.strip()]
    if not all(re.fullmatch(r"-?\d{1,9}", number) for number in found):
        raise HloError(f"numbers {shown(text)!r} cannot be read")
    return [int(number) for number in found]


def iota(dims: list[int], permutation: str | None, count: int, value: str) -> np.ndarray | None:
    """0..count-1 in the order and shape that `<=[dims]T(permutation)` says, None where they are too many."""
    order = integers(permutation) if permutation else list(range(len(dims)))
    if prod(dims) != count or sorted(order) != list(range(len(dims))):
        raise HloError(f"replica groups {shown(value)!r} do not multiply up")
    return np.arange(count).reshape(dims).transpose(order) if count <= MAX_IDS else None


def rows(ids: np.ndarray) -> Groups:
    """A [groups, size] array as tuples of plain ints."""
    return tuple(tuple(group) for group in ids.tolist())


def mesh_groups(value: str, mesh: str, device_ids: str | None, axes: str) -> tuple[Groups | None, int]:
    """The groups of devices that differ only along `axes`. The first axis of a mesh is the slowest to change."""
    names, sizes = [], []
    for piece in split(mesh):
        axis = MESH_AXIS.fullmatch(piece)
        if not axis or axis[1] in names or int(axis[2]) == 0:
            raise HloError(f"replica groups {shown(value)!r}: axis {shown(piece)!r} cannot be read")
        names.append(axis[1])
        sizes.append(int(axis[2]))
    count = prod(sizes)

    # Every axis that is taken in part is cut into what lies before the part, the part, and what lies behind it.
    cuts: dict[str, set[int]] = {name: {1, size} for name, size in zip(names, sizes, strict=True)}
    parts = []
    for piece in split(axes):
        part = MESH_PART.fullmatch(piece)
        if not part or part[1] not in cuts:
            raise HloError(f"replica groups {shown(value)!r}: axis {shown(piece)!r} is not in the mesh")
        total = sizes[names.index(part[1])]
        before, size = (int(part[2]), int(part[3])) if part[2] else (1, total)
        if not before or not size or total % (before * size):
            raise HloError(f"replica groups {shown(value)!r}: axis {shown(piece)!r} does not divide {total}")
        cuts[part[1]] |= {before, before * size}
        parts.append((part[1], before, before * size))
    factors = [(name, low, high) for name in names for low, high in steps(sorted(cuts[name]), value)]
    chosen = []
    for name, low, high in parts:
        chosen += [i for i, f in enumerate(factors) if f[0] == name and low <= f[1] and f[2] <= high]
    if len(set(chosen)) != len(chosen):
        raise HloError(f"replica groups {shown(value)!r} name an axis twice")
    lengths = [high // low for _, low, high in factors]
    size = prod(lengths[i] for i in chosen)
    if count > MAX_IDS:
        return None, size
    ids = mesh_devices(device_ids, count, value).reshape(lengths)
    rest = [i for i in range(len(factors)) if i not in chosen]
    return rows(ids.transpose(rest + chosen).reshape(count // size, size)), size


def steps(cuts: list[int], value: str) -> list[tuple[int, int]]:
    """Neighbouring cuts of an axis, each of which must divide the next."""
    pairs = list(zip(cuts, cuts[1:], strict=False))
    if any(high % low for low, high in pairs):
        raise HloError(f"replica groups {shown(value)!r}: parts of an axis overlap")
    return pairs


def mesh_devices(device_ids: str | None, count: int, value: str) -> np.ndarray:
    """The mesh's devices in order: 0..count-1, an explicit list, or a transposed iota."""
    if device_ids is None:
        return np.arange(count)
    if found := IOTA.fullmatch(device_ids.strip()):
        ids = iota(integers(found[2] or found[1]), found[3], count, value)
        assert ids is not None, "count is within MAX_IDS"
        return ids
    ids = np.array(integers(device_ids), dtype=np.int64)
    if ids.size != count or (ids < 0).any():
        raise HloError(f"replica groups {shown(value)!r}: {ids.size} device ids for a mesh of {count}")
    return ids


@lru_cache(maxsize=256)
def device_edges(value: str, mode: str, replicas: int, partitions: int) -> tuple[tuple[int, int], ...] | None:
    """(source, target) pairs of a permute, flattened ids. None where they are too many to list. Raises HloError."""
    pairs = id_lists(value)
    if any(len(pair) != 2 for pair in pairs):
        raise HloError(f"source_target_pairs {shown(value)!r} are no pairs")
    scope = replicas if mode == "cross_replica" else partitions
    if pairs and max(map(max, pairs)) >= scope:
        mode = "flattened_id"
    if 2 * len(pairs) * copies(mode, replicas, partitions) > MAX_IDS:
        return None
    return tuple((source, target) for source, target in spread(pairs, mode, replicas, partitions))
