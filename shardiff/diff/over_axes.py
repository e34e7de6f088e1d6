"""Sums over several axes of a mesh, which may be taken of whole tensors or of the shards that another axis leaves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from shardiff.diff.alignment import Match
from shardiff.diff.atoms import UNIT, Atom, Sense, is_product, same_ranks, tally

Axis = tuple[Any, int | None]  # who takes part, and how many
Sums = Mapping[tuple[Any, int | None, str], list[Atom]]  # the axis and the op -> atoms
MOST_AXES = 12  # of which every two are tried


def sums_of_shards(found: Match, sense: Sense) -> None:
    """All_reduces of tensors over an axis, for each of which there is one of its shard, if another axis scatters it.

    All that both sides reduce over the axis must be such pairs, but for what has a counterpart of the same amount over
    this axis or over both: two shards as large as one tensor are two tensors.
    """
    scattering = {
        (atom.ranks, atom.record.group_size)
        for side in (0, 1)
        for atom in found.by_op[side].get("reduce_scatter", ())
        if (atom.record.group_size or 0) > 1 and atom.moves != "activation"
    }
    every: dict[Any, tuple[list[Atom], list[Atom]]] = defaultdict(lambda: ([], []))
    for side in (0, 1):
        for atom in found.open(side, "all_reduce"):
            sums = atom.reduction in (None, "sum") and not atom.gathers and atom.moves != "activation"
            if sums and atom.elements > UNIT and atom.ranks is not None:
                every[atom.ranks, atom.record.group_size, sense.kind(atom)][side].append(atom)
    amounts_there = {
        (side, a.ranks, sense.kind(a), sense.amount(a))
        for side in (0, 1)
        for op in ("reduce_scatter", "all_reduce")
        for a in found.open(side, op)
    }
    for (ranks, group_size, kind), both in every.items():
        sides = [[a for a in side if (1 - a.side, ranks, kind, sense.amount(a)) not in amounts_there] for side in both]
        amounts = [tally((sense.amount(atom), atom.left) for atom in side) for side in sides]
        for size in {size or 0 for others, size in scattering if others not in (None, ranks)}:
            for wide, rule in ((0, "scattered_before_reduced"), (1, "reduced_before_scattered")):
                shards = Counter({amount * size: count for amount, count in amounts[1 - wide].items()})
                joined = Counter(
                    sense.amount(a)
                    for a in found.open(1 - wide, "all_reduce")
                    if a.ranks not in (None, ranks) and a.record.group_size == size * group_size
                )
                if shards and shards <= amounts[wide] and amounts[wide] - shards <= joined:
                    pair_shards(found, sides[wide], sides[1 - wide], size, sense, rule)
                    break


def pair_shards(
    found: Match, wholes: Sequence[Atom], shards: Sequence[Atom], size: int, sense: Sense, rule: str
) -> None:
    """Each of the shards with a tensor that is `size` times as large."""
    for shard in shards:
        for whole in wholes:
            if shard.left and whole.left and sense.amount(shard) * size == sense.amount(whole):
                found.pair(*(([whole], [shard]) if whole.side == 0 else ([shard], [whole])), [rule])


def equals(found: Match, whole: Atom, sense: Sense) -> bool:
    """Whether the other side has a sum of the same amount over these ranks, which is more than one of a shard."""
    return any(
        sense.amount(a) == sense.amount(whole) and sense.kind(a) == sense.kind(whole) and same_ranks(a, whole)
        for op in ("reduce_scatter", "all_reduce")
        for a in found.open(1 - whole.side, op)
    )


def sums_over_axes(found: Match, sense: Sense) -> None:
    """All sums of one kind over an axis, or over two axes and over both at once, if both sides sum up the same.

    A tensor is reduced over an axis whole, or scattered; and over a second axis whole, or only its shard. A compiler
    chooses for each tensor, and a flat bucket hides which tensors it has. So the sizes of all must add up. Or only some
    tensors are reduced over the second axis, as gains are over that which splits the weights; then each axis reduces as
    much on both sides.
    """
    every: dict[Any, tuple[Sums, Sums]] = defaultdict(lambda: (defaultdict(list), defaultdict(list)))
    for side in (0, 1):
        for op in ("all_reduce", "reduce_scatter"):
            for atom in found.by_op[side].get(op, ()):
                sums = atom.reduction in (None, "sum") and not atom.gathers and atom.moves != "activation"
                if (atom.record.group_size or 0) > 1 and sums:
                    every[sense.kind(atom)][side][atom.ranks, atom.record.group_size, op].append(atom)
    for both in every.values():
        axes = list(dict.fromkeys((ranks, size) for side in both for ranks, size, _ in side))
        for inner in axes:
            for outer in (None, *(axes if len(axes) <= MOST_AXES else ())):
                if outer == inner:
                    continue
                joined = [
                    one for one in axes if outer and is_product(one[0], [inner[0], outer[0]], sizes(one, inner, outer))
                ]
                for open_only in (False, True):  # also of what was matched, perhaps with too much of another bucket
                    sides = [Summed(side, inner, outer, joined, sense, open_only) for side in both]
                    used = [atom for side in sides for atom in side.used if atom.left]
                    rules = same_sums(*sides, exact=sense.same_phase)
                    if rules and {atom.side for atom in used} == {0, 1}:
                        phases, types = {a.record.phase for a in used}, {a.dtype for a in used}
                        rules += ["moved"] * (len(phases) > 1) + ["dtype"] * (len(types) > 1)
                        found.link([(atom, atom.left) for atom in used], rules)


class Summed:
    """What one side sums over an inner axis, an outer one, and both; amounts of all executions.

    scattered, whole: over the inner axis. outside: over the outer axis, of whole tensors and of shards. joined: over
    both. open_only: without what has a counterpart.
    """

    def __init__(
        self, sums: Sums, inner: Axis, outer: Axis | None, both: Sequence[Axis], sense: Sense, open_only: bool
    ) -> None:
        self.size, self.used = inner[1] or 0, list[Atom]()

        def amount(op: str, *axes: Axis) -> int:
            atoms = [atom for axis in axes for atom in sums.get((*axis, op), ())]
            self.used += atoms
            return sum(sense.amount(atom) * (atom.left if open_only else atom.record.times) for atom in atoms)

        self.scattered, self.whole = amount("reduce_scatter", inner), amount("all_reduce", inner)
        self.outside = amount("all_reduce", outer) if outer else 0
        self.joined = amount("all_reduce", *both)

    def reduced_whole(self) -> Fraction | None:
        """How much is reduced over the outer axis before it is scattered, or without; None if the sizes disagree."""
        inside = self.scattered + self.whole
        if not self.outside:
            return Fraction(0) if not inside or not self.joined else None
        whole = Fraction(self.size * self.outside - inside, self.size - 1)  # outside = whole + (inside - whole) / size
        return whole if 0 <= whole <= inside else None


def sizes(*axes: tuple[Any, int | None]) -> list[int | None]:
    """The numbers of ranks of (ranks, size) pairs."""
    return [size for _, size in axes]


def same_sums(left: Summed, right: Summed, exact: bool) -> list[str]:
    """The rules under which two sides sum up the same; [] if they do not.

    exact: both sides must reduce as much of the whole tensors. Else the loss, of another phase, may be missing.
    """
    totals = [side.scattered + side.whole + side.joined for side in (left, right)]
    apart = [whole for side in (left, right) if (whole := side.reduced_whole()) is not None]
    if not totals[0] or totals[0] != totals[1]:
        return []
    scattered = ["unfused_reduce_scatter" if left.scattered > right.scattered else "fused_reduce_scatter"]
    rules = scattered if left.scattered != right.scattered else []
    outer = [side.outside + side.joined for side in (left, right)]
    if outer[0] and outer[0] == outer[1] and left.joined != right.joined:
        return [*rules, "joined_axes"]  # some tensors are reduced over both axes, by one call or by two
    if len(apart) < 2:
        return []
    if [bool(side.outside or side.joined) for side in (left, right)] in ([True, False], [False, True]):
        return []  # one side does not sum over the outer axis
    wholes = [whole + side.joined for whole, side in zip(apart, (left, right), strict=True)]
    if left.joined != right.joined and (left.joined < right.joined) == (apart[0] > apart[1]) and apart[0] != apart[1]:
        rules.append("joined_axes")
    if exact and wholes[0] != wholes[1]:
        return []
    if wholes[0] != wholes[1]:
        rules.append("reduced_before_scattered" if wholes[0] < wholes[1] else "scattered_before_reduced")
    return rules
