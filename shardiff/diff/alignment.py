"""The alignment behind a diff: which records that were written match which that were derived, overlooking what.

Records are taken apart into atoms, one for each operand of a combined collective, as often as it executes. Atoms are
matched from the strictest sense of equal to the loosest; what a match had to overlook is its rule. Bytes decide, not
counts of calls: a compiler may combine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from shardiff.record import Record

ITEMSIZE = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}

# (rule, ops that were written, ops that stand for them). One side has a single op.
REWRITES = (  # two for one first, lest one of the two be taken for less
    ("decomposed_all_reduce", ("all_reduce",), ("reduce_scatter", "all_gather")),
    ("recomposed_all_reduce", ("reduce_scatter", "all_gather"), ("all_reduce",)),
    ("unfused_reduce_scatter", ("reduce_scatter",), ("all_reduce",)),
    ("fused_reduce_scatter", ("all_reduce",), ("reduce_scatter",)),
    ("gather_by_sum", ("all_gather",), ("all_reduce",)),
    ("broadcast_by_sum", ("broadcast",), ("all_reduce",)),
)


@dataclass
class Atom:
    """One operand of one record. size: payload bytes; left: how many of its executions have no match yet."""

    index: int
    record: Record
    size: int
    left: int

    @property
    def elements(self) -> float:
        """The size in elements where the type is known, in bytes where it is not."""
        return self.size / ITEMSIZE.get(self.record.dtype, 1)


Links = defaultdict[tuple[int, int], set[str]]  # (explicit index, derived index) -> the rules of their matches


@dataclass(frozen=True)
class Sense:
    """A sense of equal: with the same type, or as many elements of any; in the same phase, or in any."""

    same_type: bool
    same_phase: bool

    def key(self, atom: Atom, op: str) -> tuple[Any, ...]:
        """Two atoms are equal in this sense if their keys are, and their groups if known."""
        record = atom.record
        kind = (record.dtype, atom.size) if self.same_type else atom.elements
        return op, kind, record.phase if self.same_phase else None

    def rules(self, a: Atom, b: Atom) -> set[str]:
        """What was overlooked between two atoms."""
        moved, typed = a.record.phase != b.record.phase, a.record.dtype != b.record.dtype
        return {rule for rule, applies in (("moved", moved), ("dtype", typed)) if applies}


def match(explicit: Sequence[Record], derived: Sequence[Record]) -> tuple[Links, list[Atom], list[Atom]]:
    """All links, and the atoms of both sides, of which those with executions left have no match."""
    ours, theirs, links = atoms(explicit), atoms(derived), Links(set)
    for same_phase in (True, False):
        senses = (Sense(True, same_phase), Sense(False, same_phase))
        for sense in senses:
            _one_to_one(ours, theirs, links, sense, same_edges=True)
            _one_to_one(ours, theirs, links, sense, same_edges=False)
            _sums(ours, theirs, links, sense)
            _regrouped(ours, theirs, links, sense)
        for sense in senses:
            for rewrite in REWRITES:
                _rewrites(ours, theirs, links, sense, *rewrite)
    _extras(ours, theirs, links)
    return links, ours, theirs


def atoms(records: Sequence[Record]) -> list[Atom]:
    """The operands of all records."""
    return [Atom(i, r, size, executions(r)) for i, r in enumerate(records) for size in sizes(r)]


def sizes(record: Record) -> tuple[int, ...]:
    """The payload bytes of each operand."""
    return tuple(part.bytes for part in record.parts) or (record.payload_bytes,)


def executions(record: Record) -> int:
    """How often it runs in a step; where only a lower bound is known, that, and at least once."""
    most = record.executions.max
    return max(record.executions.min, 1) if most is None else most


def _link(ours: Sequence[Atom], theirs: Sequence[Atom], links: Links, sense: Sense, rules: Sequence[str] = ()) -> None:
    """All of `ours` together are all of `theirs`, as often as each has executions left."""
    times = min(atom.left for atom in (*ours, *theirs))
    for atom in (*ours, *theirs):
        atom.left -= times
    for a in ours:
        for b in theirs:
            links[a.index, b.index] |= sense.rules(a, b) | set(rules)


def _same_group(a: Atom, b: Atom) -> bool:
    sizes = (a.record.group_size, b.record.group_size)
    return None in sizes or sizes[0] == sizes[1]


def _candidates(many: list[Atom], sense: Sense) -> dict[tuple[Any, ...], list[Atom]]:
    """Atoms that have executions left, by their keys."""
    found = defaultdict(list)
    for atom in many:
        if atom.left:
            found[sense.key(atom, atom.record.op)].append(atom)
    return found


def _one_to_one(ours: list[Atom], theirs: list[Atom], links: Links, sense: Sense, same_edges: bool) -> None:
    candidates = _candidates(theirs, sense)
    for a in ours:
        for b in candidates.get(sense.key(a, a.record.op), ()) if a.left else ():
            edges_differ = None not in (a.record.edges, b.record.edges) and edges([a.record]) != edges([b.record])
            if a.left and b.left and _same_group(a, b) and not (edges_differ and same_edges):
                _link([a], [b], links, sense, ["edges"] if edges_differ else [])


def edges(records: Sequence[Record]) -> set[tuple[int, int]]:
    """All edges of some permutes."""
    return {edge for record in records for edge in record.edges or ()}


def _sums(ours: list[Atom], theirs: list[Atom], links: Links, sense: Sense) -> None:
    """Several of one side that add up to one of the other."""
    for ones, many in ((theirs, ours), (ours, theirs)):
        groups = defaultdict(list)  # whatever the size
        for atom in many:
            groups[_without_size(sense, atom)].append(atom)
        for one in ones:
            others = (
                [m for m in groups[_without_size(sense, one)] if m.left and _same_group(m, one)] if one.left else []
            )
            sizes = [m.size if sense.same_type else m.elements for m in others]
            chosen = [others[i] for i in subset_with_sum(sizes, one.size if sense.same_type else one.elements)]
            if len(chosen) > 1:
                _link(*([one], chosen) if many is theirs else (chosen, [one]), links, sense)


def _regrouped(ours: list[Atom], theirs: list[Atom], links: Links, sense: Sense) -> None:
    """All that is left of one kind on one side, which adds up to all that is left of it on the other."""
    groups: dict[tuple[Any, ...], tuple[list[Atom], list[Atom]]] = defaultdict(lambda: ([], []))
    for side, many in enumerate((ours, theirs)):
        for atom in (atom for atom in many if atom.left):
            groups[*_without_size(sense, atom), atom.record.group_size][side].append(atom)
    for left, right in groups.values():
        sums = [sum(a.left * (a.size if sense.same_type else a.elements) for a in side) for side in (left, right)]
        if left and right and sums[0] == sums[1] and len(left) + len(right) > 2:
            for a in left:
                for b in right:
                    links[a.index, b.index] |= sense.rules(a, b) | {"regrouped"}
            for atom in (*left, *right):
                atom.left = 0


def _without_size(sense: Sense, atom: Atom) -> tuple[Any, ...]:
    record = atom.record
    return record.op, record.dtype if sense.same_type else None, record.phase if sense.same_phase else None


def subset_with_sum(sizes: Sequence[float], target: float, most: int = 24) -> list[int]:
    """Indices of some of `sizes` that add up to `target`, or none.

    Looks for a run of neighbours, the whole among them; of up to `most` sizes, for any subset.
    """
    starts = {0.0: 0}
    for end, total in enumerate(accumulate(sizes), 1):
        if total - target in starts:
            return list(range(starts[total - target], end))
        starts[total] = end
    if len(sizes) > most:
        return []
    reached: dict[float, tuple[int, ...]] = {0.0: ()}
    for i, size in enumerate(sizes):
        for total, chosen in list(reached.items()):
            if total + size <= target and len(reached) < 10_000:
                reached.setdefault(total + size, (*chosen, i))
    return list(reached.get(target, ()))


def _rewrites(
    ours: list[Atom],
    theirs: list[Atom],
    links: Links,
    sense: Sense,
    rule: str,
    written: Sequence[str],
    derived: Sequence[str],
) -> None:
    """Atoms of the ops `written` for which those of the ops `derived`, of the same size, stand."""
    joined = len(written) > 1  # several were written, one stands for them
    singles, many, ops = (theirs, ours, written) if joined else (ours, theirs, derived)
    single_op = (derived if joined else written)[0]
    candidates = _candidates(many, sense)
    for one in singles:
        while one.left and one.record.op == single_op:
            found = [
                next((m for m in candidates.get(sense.key(one, op), ()) if m.left and _same_group(one, m)), None)
                for op in ops
            ]
            partners = [m for m in found if m is not None]
            if len(partners) < len(ops):
                break
            _link(*(partners, [one]) if joined else ([one], partners), links, sense, [rule])


def _extras(ours: list[Atom], theirs: list[Atom], links: Links) -> None:
    """Executions of derived records beyond those written, which a rule explains nevertheless."""
    kept = [a for a in ours if a.record.op == "all_gather" and a.record.phase == "forward"]
    for extra in theirs:
        if not extra.left:
            continue
        op, phase, linked = extra.record.op, extra.record.phase, [i for i, j in links if j == extra.index]
        if op == "collective_permute" and linked:
            for i in linked:
                links[i, extra.index].add("bubble_ticks")
            extra.left = 0
        alike = [a for a in kept if a.elements == extra.elements]
        if op == "all_gather" and phase == "backward" and alike:
            first, *_ = alike
            links[first.index, extra.index] |= {"gathered_again"} | (
                Sense(False, False).rules(first, extra) - {"moved"}
            )
            extra.left = 0
            kept.append(kept.pop(kept.index(first)))  # the next one is taken for another's
