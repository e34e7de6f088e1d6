"""A program's communication: its records with their totals, and the questions that one asks of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardiff.mesh import Mesh
from shardiff.record import BITS, OPS, PHASES, Record, step_bytes, totals
from shardiff.system.words import size

HTML = """<p>{{ heading }}</p>
{% if rows %}<table>
{% set side = ["left", "left", "left", "right", "right", "right"] %}
<tr>{% for name in columns %}<th style="text-align: {{ side[loop.index0] }}">{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>
{% for cell in row %}<td style="text-align: {{ side[loop.index0] }}">{{ cell }}</td>{% endfor %}
</tr>
{% endfor %}</table>{% endif %}"""


@dataclass(frozen=True)
class Share:
    """What one rank takes part in: calls, their payload, and the bytes that it must send."""

    rank: int
    calls: int
    payload_bytes: int
    wire_bytes: int


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
        """Payload of all records in one step; where a loop's trips are unknown, the least, and at least one."""
        return sum(record.payload_bytes * record.times for record in self.records)

    @property
    def wire_bytes(self) -> int:
        """What a rank must send in one step that takes part in all records, so a sum where ranks do different things.

        Where a loop's trips are unknown, the least, and at least one.
        """
        return step_bytes(self.records)

    @property
    def steps(self) -> list[Program]:
        """The training steps of a run, in order; empty where it is not known where one ends."""
        return [part for name, part in self.segments.items() if name.startswith("step ")]

    def __repr__(self) -> str:
        heading, table = self._told()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(n) if i > 2 else cell.ljust(n) for i, (cell, n) in enumerate(zip(row, widths, strict=True))
            )
            for row in table
        ]
        return "\n".join([heading, *(line.rstrip() for line in lines if len(table) > 1)])

    def _repr_html_(self) -> str:
        from jinja2 import Environment

        heading, (columns, *rows) = self._told()
        return Environment(autoescape=True).from_string(HTML).render(heading=heading, columns=columns, rows=rows)

    def _told(self) -> tuple[str, list[tuple[str, ...]]]:
        """The totals in a line, and a table of calls and bytes by phase, op and axis with its heading first.

        What "a rank sends" is what all ranks send, or where they differ, as the stages of a pipeline do, the most that
        one of them does.
        """
        kinds: dict[tuple[str, str, str], list[Record]] = {}
        for record in sorted(self.records, key=lambda record: PHASES.index(record.phase)):
            kinds.setdefault((record.phase, record.op, record.axis or ""), []).append(record)
        most, least = self._extremes()
        differ = most != least
        table: list[tuple[str, ...]] = [
            ("phase", "op", "axis", "calls", "payload", "a rank sends at most" if differ else "a rank sends")
        ]
        for kind, records in kinds.items():
            part = replace(self, records=tuple(records), segments={})
            sent = size(part._extremes()[0])
            table.append((*kind, str(sum(part.counts().values())), size(part.payload_bytes), sent))
        calls = sum(self.counts().values())
        name = f"{self.label or 'a program'}{f' ({self.mesh})' if self.mesh else ''}"
        amount = f"between {size(least)} and {size(most)}" if differ else size(most)
        sent = f"{size(self.payload_bytes)} payload, a rank sends {amount}"
        sums = f"{calls:,} call{'s' * (calls != 1)}, {sent}"
        return f"{name}: {sums if self.records else 'no communication'}", table

    def _extremes(self) -> tuple[int, int]:
        """The most and the least that a rank sends; where it is not known who takes part, the sum of all records."""
        sent = [share.wire_bytes for share in by_rank(self.records)] or [self.wire_bytes]
        return max(sent), min(sent)

    def counts(self) -> dict[str, int]:
        """Op -> calls in one step."""
        calls: Counter[str] = Counter()
        for record in self.records:
            calls[record.op] += record.times
        return dict(calls)

    def only(self, op: str | None = None, *, over: int = 0, **fields: Any) -> Program:
        """The part of the program whose records are of this op, have a payload above `over` bytes, and these fields.

        A field is any of a Record's: phase="backward", axis="tp", dtype="bfloat16", group_size=8. `source` and `detail`
        match where they contain the text. Raises ValueError for a field, op, phase, type or axis of the mesh that does
        not exist, because `assert not program.only(...)` would hold for every program.
        """
        for name in fields:
            if name not in Record.__dataclass_fields__:
                raise ValueError(f"a record has no field {name!r}; it has {', '.join(Record.__dataclass_fields__)}")
        for name, known in (("op", OPS), ("phase", PHASES), ("dtype", BITS)):
            wanted = op if name == "op" else fields.get(name)
            if wanted is not None and wanted not in known and "+" not in str(wanted):  # + joins the types of parts
                raise ValueError(f"unknown {name} {wanted!r}; known: {', '.join(known)}")
        names = {*self.mesh.names, ""} if self.mesh else None
        for axis in (fields.get("axis") or "").split(","):
            if names is not None and axis not in names:
                raise ValueError(f"no axis {axis!r} in the mesh {self.mesh}")

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

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `Program.from_json` is its inverse."""
        return {
            "label": self.label,
            "mesh": dict(self.mesh.axes) if self.mesh else None,
            "memory": self.memory,
            "records": [record.to_json() for record in self.records],
            "totals": totals(self.records),
        }

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Program:
        """Inverse of `to_json`; of what it lacks beside the records, the default. Raises ValueError, one line."""
        if not isinstance(fields, Mapping) or not isinstance(fields.get("records"), list):
            raise ValueError("a program has a list of records")
        records = tuple(map(Record.from_json, fields["records"]))
        mesh, memory = fields.get("mesh"), fields.get("memory") or {}
        for name, sizes in (("mesh", mesh or {}), ("memory", memory)):
            if not isinstance(sizes, dict) or not all(type(size) is int and size >= 0 for size in sizes.values()):
                raise ValueError(f"{name} of a program must be sizes by name, not {str(sizes)[:40]!r}")
        segments = fields.get("segments") or {}
        if not isinstance(segments, dict):
            raise ValueError(f"segments of a program must be programs by name, not {str(segments)[:40]!r}")
        ranks = Mesh(tuple(mesh.items())) if mesh else None
        parts = {name: Program.from_json(part) for name, part in segments.items()}
        return Program(records, str(fields.get("label") or ""), ranks, memory, parts)


def by_rank(records: Sequence[Record]) -> list[Share]:
    """The share of every rank that takes part in something, where that is known of all records; else none.

    A message counts for its sender. Sums over all records count more where ranks do different things, as the stages of
    a pipeline do, or groups that reduce different amounts.
    """
    shares: dict[int, list[int]] = {}
    for r in records:
        if r.edges is not None:
            members = [source for source, _ in r.edges]
        elif r.groups:
            members = [rank for group in r.groups for rank in group]
        else:
            return []
        for rank in members:
            share = shares.setdefault(rank, [0, 0, 0])
            for i, amount in enumerate((1, r.payload_bytes, r.wire_bytes)):
                share[i] += r.times * amount
    return [Share(rank, *share) for rank, share in sorted(shares.items())]
