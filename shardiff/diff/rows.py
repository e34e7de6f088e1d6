"""The rows of a diff: the records of one program beside those of the other, and each difference under a rule.

Records that share a match form a row. What no rule explains is a row of its own, "only left" or "only right", and is
never hidden. Every execution of every operand is in one row, so the bytes of the rows are those of both programs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardiff.diff.alignment import Link, Match, Node, identical, match, one_to_one, other_ranks, regrouped, sums
from shardiff.diff.atoms import Atom, Sense, rides_in_a_loop
from shardiff.diff.extras import extras
from shardiff.diff.gradients import tensor_by_tensor
from shardiff.diff.layouts import early_sums, samples_gathered, weights
from shardiff.diff.over_axes import sums_of_shards
from shardiff.diff.record_view import operation
from shardiff.diff.rewrites import rewrites
from shardiff.diff.rules import WHY, sentence
from shardiff.diff.ticks import gradients_every_tick, parameters_every_tick
from shardiff.record import Executions, Record, step_bytes

UNEXPLAINED = frozenset(("other_ranks",))  # rules that say what is different, not that it is equal
FEWER = frozenset(("recomposed_all_reduce", "joined_axes", "reduced_before_scattered", "ring"))
MORE = frozenset(("decomposed_all_reduce", "joined_axes", "reduced_before_scattered", "ring"))
SUITS_ITSELF = frozenset(
    ("regrouped", "weight_gathered", "samples_gathered", "gather_and_scatter", "resharded", "summed_early", "run_whole")
)
SAME = "the same op, ranks, type and bytes"


@dataclass(frozen=True)
class Row:
    """Records that belong together.

    verdict: "same", "rewritten", "only left" or "only right". rules: what had to be overlooked, by the names in WHY.
    left, right: the records, or what of them is in this row: some of their operands, some of their executions. why: a
    sentence for each rule.
    """

    verdict: str
    rules: tuple[str, ...]
    left: tuple[Record, ...]
    right: tuple[Record, ...]
    why: str

    @property
    def bytes(self) -> dict[str, int]:
        """Wire bytes that a rank sends for these records in one step, on either side."""
        return {"left": step_bytes(self.left), "right": step_bytes(self.right)}

    @property
    def unexplained(self) -> bool:
        """Whether no rule says that both sides are equal."""
        return self.verdict.startswith("only") or not UNEXPLAINED.isdisjoint(self.rules)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `Row.from_json` is its inverse."""
        sides = {side: [record.to_json() for record in getattr(self, side)] for side in ("left", "right")}
        return {"verdict": self.verdict, "rules": list(self.rules), **sides, "bytes": self.bytes, "why": self.why}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Row:
        """Inverse of `to_json`. Raises ValueError, one line, for a record that is none."""
        left, right = (tuple(map(Record.from_json, fields[side])) for side in ("left", "right"))
        return Row(fields["verdict"], tuple(fields["rules"]), left, right, fields["why"])


def align(
    left: Sequence[Record],
    right: Sequence[Record],
    axes: Mapping[str, str] | None = None,
    labels: tuple[str, str] = ("left", "right"),
) -> list[Row]:
    """The rows of the diff, in the order of the left records, then what only the right program has.

    axes: where the programs number their ranks differently, the left mesh's axes and those of the right that they are.
    labels: what the sides are called in sentences.
    """
    found = match(left, right, axes)
    identical(found)
    for side in (1, 0):
        tensor_by_tensor(found, side)  # before sums of one size are taken for one another
    gradients_every_tick(found)
    parameters_every_tick(found)
    for side in (1, 0):
        samples_gathered(found, side)
    for phase in ("forward", "backward"):
        early_sums(found, phase)  # before they are taken for others, or for several that were combined
    for same_phase in (True, False):
        senses = (Sense(True, same_phase), Sense(False, same_phase))
        for sense in senses:
            one_to_one(found, sense, exact_edges=True)
            one_to_one(found, sense)
            sums_of_shards(found, sense)
            sums(found, sense)
            regrouped(found, sense)
        for sense in senses:
            rewrites(found, sense)
        for side in (1, 0) if same_phase else ():
            weights(found, side, exact=True)  # before they are taken for activations of another phase
    extras(found)
    for same_phase in (True, False):
        for same_type in (True, False):
            other_ranks(found, Sense(same_type, same_phase))
    return [*_rows(found, labels), *_leftovers(found, labels)]


def _rows(found: Match, labels: tuple[str, str]) -> Iterator[Row]:
    """The connected groups of records, as far as they are explained."""
    parent: dict[Node, Node] = {}

    def root(node: Node) -> Node:
        parent.setdefault(node, node)
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for link in found.links:
        first, *others = link.nodes
        root(first)
        for other in others:
            parent[root(other)] = root(first)
    linked: dict[Node, list[Link]] = defaultdict(list)
    for link in found.links:
        linked[root(link.nodes[0])].append(link)
    members: dict[Node, tuple[list[Atom], list[Atom]]] = defaultdict(lambda: ([], []))
    for side in (0, 1):
        for atom in found.sides[side]:
            if (side, atom.index) in parent and atom.left < atom.record.times:
                members[root((side, atom.index))][side].append(atom)
    for node, sides in members.items():
        rules = set().union(*(link.rules for link in linked[node]))
        yield _row(sides, rules, labels)


def _row(sides: tuple[list[Atom], list[Atom]], rules: set[str], labels: tuple[str, str]) -> Row:
    """A row, with the rules that show only in how many calls there are on either side."""
    left, right = (tuple(_pieces(side, [a.record.times - a.left for a in side])) for side in sides)
    calls = [_calls(side) for side in sides]
    loops = [rides_in_a_loop(atom.record) for side in sides for atom in side]
    if any(loops) and {atom.record.times for atom in sides[0]} != {atom.record.times for atom in sides[1]}:
        if left and right:
            rules.add("loop")
    if calls[0] > calls[1] and not rules & (FEWER | SUITS_ITSELF):
        rules.add("combined")
    if calls[1] > calls[0] and not rules & (MORE | SUITS_ITSELF):
        rules.add("split")
    edges = [{edge for record in side for edge in record.edges or ()} for side in (left, right)]
    if edges[0] == edges[1]:
        rules.discard("edges")  # each by itself along others, together along the same
    named = tuple(rule for rule in WHY if rule in rules)
    why = ". ".join(sentence(rule, left, right, labels) for rule in named) or SAME
    return Row("rewritten" if rules else "same", named, left, right, why)


def _calls(side: Sequence[Atom]) -> int:
    """How many calls have a counterpart on the other side."""
    most: dict[int, int] = defaultdict(int)
    for atom in side:
        most[atom.index] = max(most[atom.index], atom.matched)
    return sum(most.values())


def _pieces(of: Sequence[Atom], times: Sequence[int]) -> Iterator[Record]:
    """The records of these atoms, as often as each atom counts here; a whole record is itself."""
    by_record: dict[int, dict[int, list[Atom]]] = defaultdict(lambda: defaultdict(list))
    for atom, count in zip(of, times, strict=True):
        by_record[atom.index][count].append(atom)
    for by_count in by_record.values():
        for count, some in by_count.items():
            record = some[0].record
            if len(some) < max(len(record.parts), 1):
                parts = tuple(record.parts[atom.part] for atom in some)
                one = parts[0] if len(parts) == 1 else None
                record = replace(
                    record,
                    dtype="+".join(dict.fromkeys(part.dtype for part in parts)),
                    payload_bytes=sum(atom.size for atom in some),
                    wire_bytes=sum(atom.wire for atom in some),
                    parts=() if one else parts,
                    shape=one.shape if one else None,
                    moves=one.moves if one else record.moves,
                    detail=(one.detail if one else None) or record.detail,
                )
            yield record if count == record.times else replace(record, executions=Executions(count, count))


def _leftovers(found: Match, labels: tuple[str, str]) -> Iterator[Row]:
    """What no rule explains, record by record, with what it comes closest to."""
    nearest: dict[tuple[str, int | None, int], list[Atom]] = defaultdict(list)
    for side in (0, 1):
        for atom in found.open(side):
            nearest[atom.op, atom.record.group_size, side].append(atom)
    for some in nearest.values():
        some.sort(key=lambda atom: atom.record.payload_bytes)
    for side in (0, 1):
        by_record: dict[int, list[Atom]] = defaultdict(list)
        for atom in found.open(side):
            by_record[atom.index].append(atom)
        for some in by_record.values():
            for piece in _pieces(some, [atom.left for atom in some]):
                where = f" at {piece.source}" if piece.source else ""
                many = "" if piece.times == 1 else f", {piece.times} times"
                why = f"{operation(piece)} of {piece.payload_bytes:,} bytes{many}{where}, which no rule explains"
                pair = ((piece,), ()) if side == 0 else ((), (piece,))
                yield Row(f"only {('left', 'right')[side]}", (), *pair, why + _nearest(nearest, some[0], labels))


def _nearest(left: Mapping[Any, Sequence[Atom]], atom: Atom, labels: tuple[str, str]) -> str:
    """The open record of the other side that comes closest, and by how much; "" where there is none of its op.

    left: what is open, by op, group size and side, sorted by payload.
    """
    others, payload = left.get((atom.op, atom.record.group_size, 1 - atom.side), ()), atom.record.payload_bytes
    at = bisect_left(others, payload, key=lambda other: other.record.payload_bytes)
    near = others[max(at - 1, 0) : at + 1]
    if not near:
        return ""
    other = min(near, key=lambda other: abs(other.record.payload_bytes - payload))
    apart = other.record.payload_bytes - payload
    amount = f"{abs(apart):,} bytes {'more' if apart > 0 else 'fewer'}" if apart else "the same number of bytes"
    mine, theirs = atom.record, other.record
    differs = [f"is {operation(theirs, usual=True)}"] if operation(mine) != operation(theirs) else []
    differs += [f"is of {other.dtype}"] if other.dtype != atom.dtype else []
    differs += [f"is in the phase {theirs.phase}"] if theirs.phase != mine.phase else []
    but = f", but {' and '.join(differs)}" if differs else ""
    return f"; the nearest in {labels[1 - atom.side]} has {amount}{but}"


def unexplained(rows: Sequence[Row]) -> int:
    """How many rows no rule explains."""
    return sum(row.unexplained for row in rows)


def extra_bytes(rows: Sequence[Row]) -> int:
    """Wire bytes of a rank in one step that the right program sends beyond those of the left."""
    return sum(row.bytes["right"] - row.bytes["left"] for row in rows)
