"""The operands of all records, one by one, and in which sense two of them are equal.

A combined collective is taken apart into one atom for each operand, which runs as often as its record. What decides is
what is moved (a parameter, a gradient, an activation; its shape), then among which ranks, then how many bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import lcm
from typing import Any

from shardiff.record import BITS, Record

UNIT = lcm(*BITS.values())  # elements are counted in so many parts of one, so that what is packed has a whole number
SUMS = ("sum", "avg", "premul_sum")  # a mean is a sum; which rank divides, and when, is no communication
REDUCES = ("all_reduce", "reduce_scatter", "reduce")
JAX_COLLECTIVES = (
    *("psum", "pmax", "pmin", "all_gather", "reduce_scatter", "psum_scatter", "all_to_all", "ppermute", "pbroadcast"),
    *("psum_invariant", "all_gather_invariant", "all_gather_reduced", "unreduced_psum", "ragged_all_to_all"),
)


@dataclass(eq=False)
class Atom:
    """One operand of one record.

    side: 0 for the left program, 1 for the right. index: of the record in its program. size: payload bytes. wire: what
    a rank sends for it, each time. left: how many of its executions have no explanation yet. matched: how many have a
    counterpart. ranks: who takes part, comparable over the sides; None where that is not known.
    """

    side: int
    index: int
    record: Record
    part: int
    dtype: str
    size: int
    wire: int
    shape: tuple[int, ...] | None
    moves: str | None
    left: int
    ranks: Any = None
    matched: int = 0
    elements: int = field(init=False)

    def __post_init__(self) -> None:
        self.elements = self.size * 8 * (UNIT // BITS.get(self.dtype, 8))

    @property
    def op(self) -> str:
        return self.record.op

    @property
    def gathers(self) -> bool:
        """Whether this gathers: as an all_gather does, or as a sum of which each rank is seen to add its own slice."""
        return self.op == "all_gather" or (self.record.parts[self.part] if self.record.parts else self.record).gathers

    @property
    def detail(self) -> str | None:
        """What it moves, or the operation for which it does, of this operand where that is known."""
        return (self.record.parts[self.part].detail if self.record.parts else None) or self.record.detail

    def amount(self, same_type: bool) -> int:
        """Bytes, or elements of whatever type, in parts of one."""
        return self.size if same_type else self.elements

    @property
    def reduction(self) -> str | None:
        """How it is reduced, all kinds of sums being one."""
        return "sum" if self.record.reduction in SUMS else self.record.reduction

    def signature(self) -> tuple[Any, ...]:
        """What decides, beside op, amount and phase, whether this can be the counterpart of another atom."""
        r = self.record
        compiled = r.computation is not None
        return self.ranks, r.group_size, r.edges, self.reduction, r.root, self.moves, self.shape, compiled, self.gathers


def atoms(records: Sequence[Record], side: int, axes: Mapping[str, str] | None) -> list[Atom]:
    """The operands of all records. axes: the left program's axes and those of the right that they are; see `ranks`."""
    found = []
    for i, record in enumerate(records):
        among = ranks(record, side, axes)
        if not record.parts:
            found.append(
                Atom(
                    *(side, i, record, 0, record.dtype, record.payload_bytes, record.wire_bytes),
                    *(record.shape, record.moves, record.times, among),
                )
            )
        for number, part in enumerate(record.parts):
            wire = share(record, number)
            shape, moves = part.shape, part.moves or record.moves
            found.append(Atom(side, i, record, number, part.dtype, part.bytes, wire, shape, moves, record.times, among))
    return found


def share(record: Record, number: int) -> int:
    """The wire bytes of one part of a record, such that those of all parts add up to the record's."""
    total = sum(part.bytes for part in record.parts)
    ends = [sum(part.bytes for part in record.parts[: number + more]) for more in (0, 1)]
    if not total:
        return record.wire_bytes if number == 0 else 0
    start, end = (record.wire_bytes * at // total for at in ends)
    return end - start


def ranks(record: Record, side: int, axes: Mapping[str, str] | None) -> Any:
    """Who takes part: the groups as sets; or, where the caller maps the axes of the two meshes, the axes' names."""
    if axes and record.axis:
        names = record.axis.split(",")
        mine = [axes.get(name) for name in names] if side == 0 else [n if n in axes.values() else None for n in names]
        if None not in mine:
            return frozenset(mine)
    return groups_as_sets(record.groups) if record.groups else None


@lru_cache(maxsize=4096)
def groups_as_sets(groups: tuple[tuple[int, ...], ...]) -> frozenset[frozenset[int]]:
    return frozenset(map(frozenset, groups))


def tally(pairs: Iterable[tuple[int, int]]) -> Counter[int]:
    """Number -> how often it is there. How often may come from a file, so nothing loops that many times."""
    found: Counter[int] = Counter()
    for number, often in pairs:
        found[number] += often
    return found


def by_axes(ranks: Any) -> bool:
    """Whether ranks are told by axes."""
    return ranks is not None and any(isinstance(one, str) for one in ranks)


def is_product(whole: Any, factors: Sequence[Any], sizes: Sequence[int | None]) -> bool:
    """Whether groups are those of several axes together, whose own groups are `factors`; sizes: of all, whole first.

    Where it is not known who takes part, the sizes decide.
    """
    if None in sizes or len(factors) < 2 or 1 in sizes[1:]:
        return False
    product = 1
    for size in sizes[1:]:
        product *= size or 0
    if product != sizes[0]:
        return False
    known = [one for one in factors if one is not None]
    if whole is None or len(known) < len(factors):
        return True
    if by_axes(whole):
        return all(map(by_axes, factors)) and sorted(whole) == sorted(name for factor in factors for name in factor)
    if any(map(by_axes, factors)):
        return False
    for group in whole:
        inside = [[g for g in factor if g <= group] for factor in factors]
        if any(sum(map(len, parts)) != len(group) for parts in inside):
            return False
        places = {tuple(next(i for i, g in enumerate(parts) if rank in g) for parts in inside) for rank in group}
        if len(places) != len(group):
            return False
    return True


def agree(a: Any, b: Any) -> bool:
    """Whether two facts are the same, or one is not known."""
    return a is None or b is None or a == b


def same_ranks(a: Atom, b: Atom) -> bool:
    """Whether the same ranks take part, as far as that is known; a permute may have some of the other's edges."""
    if by_axes(a.ranks) and by_axes(b.ranks):
        return a.ranks == b.ranks
    mine, theirs = a.record.edges, b.record.edges
    if mine is not None and theirs is not None:
        return set(mine) <= set(theirs) or set(theirs) <= set(mine)
    if not agree(a.record.group_size, b.record.group_size):
        return False
    return agree(a.ranks, b.ranks) or more_groups(a, b) or more_groups(b, a)


def more_groups(a: Atom, b: Atom) -> bool:
    """Whether an SPMD program runs in all groups of an axis what another runs in some of them."""
    if a.record.computation is None or a.ranks is None or b.ranks is None or by_axes(a.ranks) or by_axes(b.ranks):
        return False
    return b.ranks < a.ranks


def same_work(a: Atom, b: Atom) -> bool:
    """Whether they move the same kind of thing and reduce it in the same way, from or to the same root."""
    if not agree(a.moves, b.moves):
        return False
    if a.op == b.op:
        return agree(a.reduction, b.reduction) and agree(a.record.root, b.record.root)
    if a.op in REDUCES and b.op in REDUCES and (a.gathers or b.gathers):
        return False
    kinds = [atom.reduction for atom in (a, b) if atom.op in REDUCES]
    return agree(*kinds) if len(kinds) == 2 else all(agree(kind, "sum") for kind in kinds)  # zeros leave a sum alone


def kind_of(dtype: str) -> str:
    """Types change on the wire only within a kind: floats, integers (bool among them), or complex numbers."""
    if "+" in dtype or dtype not in BITS:
        return dtype
    if dtype.startswith(("float", "bfloat")):
        return "float"
    return "complex" if dtype.startswith("complex") else "integer"


def likeness(a: Atom, b: Atom) -> int:
    """How much of what is known of both is equal: the higher, the rather they are counterparts."""
    facts = zip(a.signature(), b.signature(), (8, 1, 8, 1, 1, 4, 2, 0, 0), strict=True)
    score = sum(weight for mine, theirs, weight in facts if mine is not None and mine == theirs)
    return score + (set(a.record.edges or ()) == set(b.record.edges or ()))


def rides_in_a_loop(record: Record) -> bool:
    """Whether this is one instruction of a compiled program that runs more than once; equal calls are no loop."""
    return record.computation is not None and record.times > 1


def by_compiler(atom: Atom) -> bool:
    """Whether a partitioner put it there: its name is that of an operation that is no collective."""
    return atom.detail is not None and "/" in atom.detail and not asked_for(atom)


def asked_for(atom: Atom) -> bool:
    """Whether the program asks for it, as far as its name tells."""
    return atom.record.computation is None or operation(atom) in JAX_COLLECTIVES


def operation(atom: Atom) -> str:
    """The name of the operation of a compiled program for which it is, without the operations around it."""
    return (atom.detail or "").rpartition("/")[2].partition(".")[0]


@dataclass(frozen=True)
class Sense:
    """A sense of equal: with the same type, or as many elements of one kind; in the same phase, or in any."""

    same_type: bool
    same_phase: bool

    def kind(self, atom: Atom) -> tuple[Any, ...]:
        """Equal for two atoms that are equal in this sense but for their amount."""
        dtype = atom.dtype if self.same_type else kind_of(atom.dtype)
        return dtype, atom.record.phase if self.same_phase else None

    def amount(self, atom: Atom) -> int:
        return atom.amount(self.same_type)

    def allows(self, a: Atom, b: Atom) -> bool:
        """Whether two atoms are of one kind, work and ranks."""
        return self.kind(a) == self.kind(b) and same_work(a, b) and same_ranks(a, b)


def overlooked(a: Atom, b: Atom) -> set[str]:
    """The rules for what is different between two counterparts."""
    mine, theirs = a.record, b.record
    edges = None not in (mine.edges, theirs.edges) and set(mine.edges or ()) != set(theirs.edges or ())
    reductions = {mine.reduction, theirs.reduction} - {None}
    applies = {
        "moved": mine.phase != theirs.phase,
        "dtype": a.dtype != b.dtype,
        "edges": edges and not by_axes(a.ranks),
        "more_groups": more_groups(a, b) or more_groups(b, a),
        "averaged": a.op == b.op and len(reductions) > 1,
    }
    return {rule for rule, applied in applies.items() if applied}
