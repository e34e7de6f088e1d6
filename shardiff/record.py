"""The vocabulary of communication: one record per collective, its payload bytes and its wire bytes.

Payload bytes S follow nccl-tests (doc/PERFORMANCE.md), per rank: the buffer for all_reduce, all_to_all, broadcast,
reduce and collective_permute; the total output for all_gather and gather; the total input for reduce_scatter and
scatter. Wire bytes are what a rank must send under the bandwidth-optimal algorithm (Patarasu and Yuan 2009 for
all_reduce), so that two programs can be compared whatever algorithm a library picks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Annotated, Any, Literal

import msgspec

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
SCHEMA = 2  # of every JSON document that holds records
PHASES = ("forward", "backward", "update", "other")
# Bits of an element, by the names that NumPy, ml_dtypes and torch use; what is narrower than a byte is packed.
BITS = {
    **dict.fromkeys(("complex128",), 128),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 64),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32", "qint32"), 32),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16", "bits16"), 16),
    **dict.fromkeys(("bool", "int8", "uint8", "qint8", "quint8", "bits8", "float8_e3m4", "float8_e4m3"), 8),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz"), 8),
    "float8_e8m0fnu": 8,
    **{f"{kind}{bits}": bits for kind in ("int", "uint") for bits in range(1, 8)},
    **dict.fromkeys(("float4_e2m1fn", "float4_e2m1fn_x2", "quint4x2", "bits4x2"), 4),
    **dict.fromkeys(("float6_e2m3fn", "float6_e3m2fn"), 6),
    **dict.fromkeys(("quint2x4", "bits2x4"), 2),
    "bits1x8": 1,
}

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@dataclass(frozen=True)
class Executions:
    """How often a record runs in one training step; max is None when it cannot be known."""

    min: Count = 1
    max: Count | None = 1

    def __mul__(self, other: Executions) -> Executions:
        """Nesting: a loop of `self` trips around something that runs `other` times."""
        if self.max is None or other.max is None:
            return Executions(self.min * other.min, 0 if 0 in (self.max, other.max) else None)
        return Executions(self.min * other.min, self.max * other.max)

    def __add__(self, other: Executions) -> Executions:
        """Succession: something that runs `self` times here and `other` times there."""
        most = None if self.max is None or other.max is None else self.max + other.max
        return Executions(self.min + other.min, most)


@dataclass(frozen=True)
class Part:
    """One operand of a combined collective: its dtype, its payload bytes, and, where known, its shape and what it is.

    shape, moves, detail, gathers: as a Record's.
    """

    dtype: str
    bytes: Count
    shape: tuple[Count, ...] | None = None
    moves: Literal["parameter", "gradient", "activation"] | None = None
    detail: str | None = None
    gathers: bool = False


@dataclass(frozen=True)
class Record:
    """One collective: an instruction of a compiled program, or one global call of a torch program.

    op: one of OPS. dtype: the name on the wire ("float32"; "float32+bfloat16" where operands of several were combined).
    payload_bytes: S, see above. wire_bytes: sent by a rank.
    axis: mesh axis, where known. group_size: ranks that take part; None for a permute or when unknown. groups: the
    ranks of each group. edges: (source, target) pairs of a permute. name, computation: where a compiler's text has it.
    source: file:line of the user's code. flags: what a reader should know ("promoted"). detail: parameter or layer.
    parts: the operands where several were combined into this one, else empty. reduction: sum, max, ...; None where
    nothing is reduced, or the source does not say. root: the place of the root in its group, 0 for the first rank; None
    where there is none, or it is not known. shape: of the array whose bytes are the payload. moves: what the array is:
    a "parameter", the "gradient" of one, or an "activation" (or its gradient); None where that is not known. gathers:
    of an all_reduce, whether each rank is seen to add its own slice to zeros, so that the sum is a gather.
    """

    op: Literal[OPS]  # type: ignore[valid-type]
    dtype: str
    payload_bytes: Count
    wire_bytes: Count
    axis: str | None = None
    group_size: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)] | None = None
    groups: tuple[tuple[Count, ...], ...] | None = None
    edges: tuple[tuple[Count, Count], ...] | None = None
    executions: Executions = Executions()
    phase: Literal[PHASES] = "other"  # type: ignore[valid-type]
    is_async: bool = False
    name: str | None = None
    computation: str | None = None
    source: str | None = None
    flags: tuple[str, ...] = ()
    detail: str | None = None
    parts: tuple[Part, ...] = ()
    reduction: str | None = None
    root: Count | None = None
    shape: tuple[Count, ...] | None = None
    moves: Literal["parameter", "gradient", "activation"] | None = None
    gathers: bool = False

    @property
    def times(self) -> int:
        """How often it runs in a step: the most; where that is unknown, the least, and at least once."""
        most = self.executions.max
        return max(self.executions.min, 1) if most is None else most

    def to_json(self) -> dict[str, Any]:
        """A dict of plain JSON types; `Record.from_json` is its inverse."""
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Record:
        """Inverse of `to_json`, also after a trip through JSON, which turns tuples into lists.

        Raises ValueError, one line, for what is no record: an unknown or missing field, or a value of another type.
        """
        if not isinstance(fields, dict) or not NEEDED <= fields.keys():
            raise ValueError("a record has at least op, dtype, payload_bytes and wire_bytes")
        for name in fields:
            if name not in KNOWN or not _known_inside(name, fields[name]):
                raise _refusal(name, fields[name])
        try:
            return msgspec.convert(fields, Record)
        except msgspec.ValidationError as error:
            name = found[1] if (found := re.search(r"`\$\.(\w+)", str(error))) else "op"
            raise _refusal(name, fields[name]) from None


NEEDED = frozenset(("op", "dtype", "payload_bytes", "wire_bytes"))
KNOWN = frozenset(field.name for field in fields(Record))
INSIDE = {
    kind: frozenset(field.name for field in fields(of)) for kind, of in (("executions", Executions), ("parts", Part))
}


def _known_inside(name: str, value: Any) -> bool:
    """Whether the objects in a field have no unknown keys, which msgspec ignores in dataclasses."""
    inside = [value] if name == "executions" else value if name == "parts" and isinstance(value, list | tuple) else ()
    return all(not isinstance(one, dict) or one.keys() <= INSIDE[name] for one in inside)


def _refusal(name: Any, value: Any) -> ValueError:
    shown = "a number beyond 2**63" if type(value) is int and abs(value) >= 2**63 else str(value)[:40]
    return ValueError(f"{str(name)[:40]} of a record cannot be {shown!r}")


def num_bytes(elements: int, dtype: str) -> int:
    """The bytes of so many elements, packed and rounded up. Raises ValueError for a dtype whose size is unknown."""
    if dtype not in BITS:
        raise ValueError(f"the size of dtype {dtype!r} is unknown")
    return -(-elements * BITS[dtype] // 8)


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


def step_bytes(records: Iterable[Record]) -> int:
    """Wire bytes that a rank sends for these records in one step, each as often as `Record.times` says."""
    return sum(record.wire_bytes * record.times for record in records)
