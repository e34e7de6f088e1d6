"""The diff: records that were written beside records that were derived, and each difference under a rule.

Records that share a match (see `shardiff.diff.alignment`) form a row. What no rule explains is a row of its own,
"only explicit" or "only derived", and is never hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardiff.diff.alignment import Atom, Links, edges, executions, match
from shardiff.record import Record, wire_bytes

WHY = {
    "unfused_reduce_scatter": "an all_reduce, of which each rank keeps its slice: the sum that a reduce_scatter gives, "
    "for twice the wire bytes",
    "fused_reduce_scatter": "only a slice of the sum is used, so a reduce_scatter does: half the wire bytes",
    "decomposed_all_reduce": "a reduce_scatter and an all_gather are the two halves of an all_reduce: the same bytes",
    "recomposed_all_reduce": "a reduce_scatter and an all_gather in one: an all_reduce, the same bytes",
    "gather_by_sum": "each rank adds its part to zeros: a gather, for twice the wire bytes",
    "broadcast_by_sum": "all but the root add zeros: a broadcast, for up to twice the wire bytes",
    "combined": "several collectives in one, operand by operand: the same bytes, the latency is paid once",
    "split": "one collective in several: the same bytes",
    "regrouped": "as many bytes in all, combined and split in another way",
    "loop": "one instruction in a loop stands for as many calls as it has trips",
    "dtype": "another type on the wire",
    "moved": "in another phase: when, not what",
    "edges": "a permute along other edges: what a rank sends is the same",
    "gathered_again": "gathered a second time instead of kept since the forward pass: less memory, more bytes",
    "bubble_ticks": "a loop permutes in every tick, in those of the bubble too, where nobody uses what arrives",
}


@dataclass(frozen=True)
class Row:
    """Records that belong together. verdict: "same", "rewritten", "only explicit" or "only derived".

    rules: what had to be overlooked, by the names in WHY. explicit, derived: indices of records. bytes: wire bytes that
    a rank sends for them in one step, on either side.
    """

    verdict: str
    rules: tuple[str, ...]
    explicit: tuple[int, ...]
    derived: tuple[int, ...]
    bytes: dict[str, int]
    why: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; the rules joined by "+", None if the same."""
        row = asdict(self)
        return {"verdict": row.pop("verdict"), "rule": "+".join(row.pop("rules")) or None, **row}


def align(explicit: Sequence[Record], derived: Sequence[Record]) -> list[Row]:
    """The rows of the diff, in the order of the explicit records, then what is only derived."""
    links, ours, theirs = match(explicit, derived)
    return [*_rows(explicit, derived, links), *_leftovers(ours, theirs)]


def _rows(explicit: Sequence[Record], derived: Sequence[Record], links: Links) -> Iterator[Row]:
    """The connected groups of records."""
    neighbours: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for i, j in links:
        neighbours["explicit", i].append(("derived", j))
        neighbours["derived", j].append(("explicit", i))
    seen: set[tuple[str, int]] = set()
    for start in sorted(node for node in neighbours if node[0] == "explicit"):
        group, todo = [], [start]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                group.append(node)
                todo += neighbours[node]
        if group:
            left, right = (sorted(i for side, i in group if side == name) for name in ("explicit", "derived"))
            rules = {rule for i in left for _, j in neighbours["explicit", i] for rule in links[i, j]}
            yield _row(explicit, derived, left, right, rules)


def _row(
    explicit: Sequence[Record], derived: Sequence[Record], left: list[int], right: list[int], rules: set[str]
) -> Row:
    """A row, with the rules that show only in how many records there are, and how often they run."""
    ours, theirs = [explicit[i] for i in left], [derived[j] for j in right]
    if {executions(r) for r in ours} != {executions(r) for r in theirs}:
        rules.add("loop")
    elif "regrouped" in rules:
        pass  # that says it all
    elif len(left) > len(right) and "recomposed_all_reduce" not in rules:
        rules.add("combined")
    elif len(right) > len(left) and not rules & {"decomposed_all_reduce", "gathered_again"}:
        rules.add("split")
    if edges(ours) == edges(theirs):
        rules.discard("edges")  # each by itself along others, together along the same
    return Row(
        verdict="rewritten" if rules else "same",
        rules=tuple(rule for rule in WHY if rule in rules),
        explicit=tuple(left),
        derived=tuple(right),
        bytes={"explicit": step_bytes(ours), "derived": step_bytes(theirs)},
        why=". ".join(sentence(rule, ours, theirs) for rule in WHY if rule in rules) or "the same op, group and bytes",
    )


def sentence(rule: str, ours: Sequence[Record], theirs: Sequence[Record]) -> str:
    """What the compiler did to these records under a rule, and why that is equal."""

    def values(name: str, records: Sequence[Record]) -> str:
        return "/".join(sorted({getattr(record, name) for record in records}))

    details = {
        "dtype": f": {values('dtype', theirs)} instead of {values('dtype', ours)}",
        "moved": f"; {values('phase', ours)} as written, {values('phase', theirs)} as derived",
    }
    return WHY[rule] + details.get(rule, "")


def _leftovers(ours: list[Atom], theirs: list[Atom]) -> Iterator[Row]:
    for side, many in (("explicit", ours), ("derived", theirs)):
        left: dict[int, int] = defaultdict(int)  # record -> wire bytes without a match
        for atom in many:
            if atom.left:
                left[atom.index] += atom.left * wire_bytes(atom.record.op, atom.size, atom.record.group_size)
        records = {atom.index: atom.record for atom in many}
        for index, size in left.items():
            record = records[index]
            indices = {"explicit": (), "derived": (), side: (index,)}
            where = f" at {record.source}" if record.source else ""
            why = f"{record.op} of {record.payload_bytes:,} bytes{where}, which no rule explains"
            yield Row(f"only {side}", (), bytes={"explicit": 0, "derived": 0, side: size}, why=why, **indices)


def step_bytes(records: Sequence[Record]) -> int:
    """Wire bytes that a rank sends for these records in one step."""
    return sum(record.wire_bytes * executions(record) for record in records)


def unexplained(rows: Sequence[Row]) -> int:
    """How many rows no rule explains."""
    return sum(row.verdict.startswith("only") for row in rows)
