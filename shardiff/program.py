"""A program's communication: its records with their totals, and the questions that one asks of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from shardiff.mesh import Mesh
from shardiff.record import Record, totals


@dataclass(frozen=True)
class Program:
    """What a program communicates in one step.

    records: in the order in which they run, as far as that is known. label: what a table calls it. mesh: its ranks on
    named axes, where known; the records' axes follow from it. memory: bytes of one device by kind, where a compiler has
    planned them. segments: where the records are of a whole run, its parts in order: "set-up", "step 1", "step 2", ...,
    "rest".
    """

    records: tuple[Record, ...]
    label: str = ""
    mesh: Mesh | None = None
    memory: dict[str, int] = field(default_factory=dict)
    segments: dict[str, Program] = field(default_factory=dict)

    def __post_init__(self) -> None:
        records = self.mesh.named(self.records) if self.mesh else self.records
        object.__setattr__(self, "records", tuple(records))

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def payload_bytes(self) -> int:
        """Payload of one step; where a loop's trips are unknown, the least."""
        return _known(totals(self.records)["payload_bytes"])

    @property
    def wire_bytes(self) -> int:
        """What a rank must send in one step; where a loop's trips are unknown, the least."""
        return _known(totals(self.records)["wire_bytes"])

    @property
    def steps(self) -> list[Program]:
        """The training steps of a run, in order; empty where it is not known where one ends."""
        return [part for name, part in self.segments.items() if name.startswith("step ")]

    def counts(self) -> dict[str, int]:
        """Op -> calls in one step."""
        calls: Counter[str] = Counter()
        for record in self.records:
            calls[record.op] += record.executions.min if record.executions.max is None else record.executions.max
        return dict(calls)

    def only(self, op: str | None = None, *, over: int = 0, **fields: Any) -> Program:
        """The part of the program whose records are of this op, have a payload above `over` bytes, and these fields.

        A field is any of a Record's: phase="backward", axis="tp", dtype="bfloat16", group_size=8. `source` and `detail`
        match where they contain the text.
        """
        for name in fields:
            if name not in Record.__dataclass_fields__:
                raise ValueError(f"a record has no field {name!r}; it has {', '.join(Record.__dataclass_fields__)}")

        def fits(record: Record) -> bool:
            if (op is not None and record.op != op) or record.payload_bytes <= over and over > 0:
                return False
            for name, wanted in fields.items():
                value = getattr(record, name)
                if name in ("source", "detail") and isinstance(wanted, str):
                    if wanted not in (value or ""):
                        return False
                elif value != wanted:
                    return False
            return True

        parts = {name: part.only(op, over=over, **fields) for name, part in self.segments.items()}
        return replace(self, records=tuple(filter(fits, self.records)), segments=parts)


def _known(span: dict[str, int | None]) -> int:
    return int(span["min"] or 0) if span["max"] is None else int(span["max"] or 0)
