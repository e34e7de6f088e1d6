"""The vocabulary of communication: one record per collective, its payload bytes and its wire bytes.

Payload bytes S follow nccl-tests (doc/PERFORMANCE.md), per rank: the buffer for all_reduce, all_to_all, broadcast,
reduce and collective_permute; the total output for all_gather and gather; the total input for reduce_scatter and
scatter. Wire bytes are what a rank must send under the bandwidth-optimal algorithm (Patarasu and Yuan 2009 for
all_reduce), so that two programs can be compared whatever algorithm a library picks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)
PHASES = ("forward", "backward", "update", "other")


@dataclass(frozen=True)
class Executions:
    """How often a record runs in one training step; max is None when it cannot be known."""

    min: int = 1
    max: int | None = 1

    def __mul__(self, other: Executions) -> Executions:
        """Nesting: a loop of `self` trips around something that runs `other` times."""
        bounded = self.max is not None and other.max is not None
        unknown = None if 0 not in (self.max, other.max) else 0
        return Executions(self.min * other.min, self.max * other.max if bounded else unknown)  # type: ignore[operator]

    def __add__(self, other: Executions) -> Executions:
        """Succession: something that runs `self` times here and `other` times there."""
        bounded = self.max is not None and other.max is not None
        return Executions(self.min + other.min, self.max + other.max if bounded else None)  # type: ignore[operator]


@dataclass(frozen=True)
class Record:
    """One collective: an instruction of a compiled program, or one global call of a torch program.

    op: one of OPS. dtype: the name on the wire ("float32"). payload_bytes: S, see above. wire_bytes: sent by a rank.
    axis: mesh axis, where known. group_size: ranks that take part; None for a permute or when unknown. groups: the
    ranks of each group. edges: (source, target) pairs of a permute. name, computation: where a compiler's text has it.
    source: file:line of the user's code. flags: what a reader should know ("promoted"). detail: parameter or layer.
    parts: the payload bytes of each operand where several were combined into this one, else empty. reduction: sum, max,
    ...; None where nothing is reduced, or the source does not say.
    """

    op: str
    dtype: str
    payload_bytes: int
    wire_bytes: int
    axis: str | None = None
    group_size: int | None = None
    groups: tuple[tuple[int, ...], ...] | None = None
    edges: tuple[tuple[int, int], ...] | None = None
    executions: Executions = Executions()
    phase: str = "other"
    is_async: bool = False
    name: str | None = None
    computation: str | None = None
    source: str | None = None
    flags: tuple[str, ...] = ()
    detail: str | None = None
    parts: tuple[int, ...] = ()
    reduction: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A dict of plain JSON types; `Record.from_json` is its inverse."""
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Record:
        """Inverse of `to_json`, also after a trip through JSON, which turns tuples into lists.

        Raises ValueError, one line, for what is no record: an unknown or missing field, or a value of another type.
        """
        if not isinstance(fields, dict) or not {"op", "dtype", "payload_bytes", "wire_bytes"} <= fields.keys():
            raise ValueError("a record has at least op, dtype, payload_bytes and wire_bytes")
        values = dict(fields)
        for name, value in fields.items():
            if not _VALID.get(name, _never)(value):
                shown = "a number beyond 2**63" if type(value) is int and abs(value) >= 2**63 else str(value)[:40]
                raise ValueError(f"{str(name)[:40]} of a record cannot be {shown!r}")
        values["executions"] = Executions(**values.get("executions", {}))
        for key in ("groups", "edges"):
            if values.get(key) is not None:
                values[key] = tuple(tuple(ranks) for ranks in values[key])
        for key in ("flags", "parts"):
            values[key] = tuple(values.get(key, ()))
        return Record(**values)


def _never(value: Any) -> bool:
    return False


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _list_of(valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(valid, value))


def _executions(value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() <= {"min", "max"}:
        return False
    return _count(value.get("min", 1)) and (value.get("max", 1) is None or _count(value.get("max", 1)))


_VALID: dict[str, Callable[[Any], bool]] = {
    "op": lambda value: isinstance(value, str) and value in OPS,
    "dtype": lambda value: isinstance(value, str),
    "payload_bytes": _count,
    "wire_bytes": _count,
    "group_size": lambda value: value is None or (_count(value) and value > 0),
    "groups": lambda value: value is None or _list_of(_list_of(_count))(value),
    "edges": lambda value: value is None or (_list_of(_list_of(_count))(value) and all(len(e) == 2 for e in value)),
    "executions": _executions,
    "phase": lambda value: isinstance(value, str) and value in PHASES,
    "is_async": lambda value: isinstance(value, bool),
    "flags": _list_of(lambda value: isinstance(value, str)),
    "parts": _list_of(_count),
    **dict.fromkeys(("axis", "name", "computation", "source", "detail", "reduction"), _text),
}


def wire_factor(op: str, group_size: int | None) -> Fraction:
    """Wire bytes over payload bytes for `group_size` ranks. Exact, because wire bytes are compared for equality.

    A permute, broadcast or reduce sends its buffer once whatever the size, and nothing within a group of one.
    """
    if op in ("collective_permute", "broadcast", "reduce"):
        return Fraction(0 if group_size == 1 else 1)
    if group_size is None:
        raise ValueError(f"{op} needs a group size")
    if group_size < 1:
        raise ValueError(f"group size must be at least 1, got {group_size}")
    share = Fraction(group_size - 1, group_size)
    if op == "all_reduce":
        return 2 * share
    if op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return share
    raise ValueError(f"unknown op {op!r}; known: {', '.join(OPS)}")


def wire_bytes(op: str, payload_bytes: int, group_size: int | None) -> int:
    """Bytes that a rank must send under the bandwidth-optimal algorithm, rounded down to whole bytes."""
    return int(payload_bytes * wire_factor(op, group_size))


def record(op: str, dtype: str, payload_bytes: int, group_size: int | None, **fields: Any) -> Record:
    """A Record whose wire bytes follow from the other fields."""
    wire = wire_bytes(op, payload_bytes, group_size)
    return Record(op, dtype, payload_bytes, wire, group_size=group_size, **fields)


def totals(records: Iterable[Record]) -> dict[str, Any]:
    """Sums over one step: the number of records; calls, payload and wire bytes as {min, max}, max None if unknown."""
    records = list(records)
    sums: dict[str, Any] = {"records": len(records)}
    weights = {
        "calls": [1] * len(records),
        "payload_bytes": [r.payload_bytes for r in records],
        "wire_bytes": [r.wire_bytes for r in records],
    }
    for key, each in weights.items():
        least = sum(w * r.executions.min for w, r in zip(each, records, strict=True))
        most: int | None = 0
        for w, r in zip(each, records, strict=True):
            if w and r.executions.max is None:
                most = None
                break
            most += w * (r.executions.max or 0)
        sums[key] = {"min": least, "max": most}
    return sums
