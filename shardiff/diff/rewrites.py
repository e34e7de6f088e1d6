"""Rewrites: collectives for which others stand, one for one, two for one, or several for one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

from shardiff.diff.alignment import Match, Rewrite, cumulative, one_to_one, regrouped, sums
from shardiff.diff.atoms import Atom, Sense, agree, is_product, same_ranks, same_work
from shardiff.diff.over_axes import equals, sums_over_axes
from shardiff.diff.rings import one_peer, rings

ONE_FOR_ONE = (
    Rewrite("unfused_reduce_scatter", "reduce_scatter", "all_reduce"),
    Rewrite("fused_reduce_scatter", "all_reduce", "reduce_scatter"),
    Rewrite("broadcasts_as_gather", "broadcast", "all_gather"),
    Rewrite("broadcasts_as_gather", "all_gather", "broadcast"),
    Rewrite("gather_by_sum", "all_gather", "all_reduce", anywhere=False, by_sum=True),
    Rewrite("broadcast_by_sum", "broadcast", "all_reduce", anywhere=False, by_sum=True),
)


def rewrites(found: Match, sense: Sense) -> None:
    """All rewrites in one sense; those of two for one first, lest one of the two be taken for less."""
    ops = [{atom.op for atom in found.open(side)} for side in (0, 1)]
    for side in (0, 1):
        if "all_reduce" in ops[side] and {"reduce_scatter", "all_gather"} <= ops[1 - side]:
            halves(found, sense, side)
        if "all_reduce" in ops[0] & ops[1]:
            joined_axes(found, sense, side)
        if "reduce_scatter" in ops[side] and "all_reduce" in ops[0] & ops[1]:
            scattered_first(found, sense, side)
        if "all_reduce" in ops[0] & ops[1]:
            reduced_whole(found, sense, side)
        if "collective_permute" in ops[1 - side]:
            rings(found, sense, side)
            one_peer(found, sense, side)
        for rewrite in ONE_FOR_ONE:
            ends = (rewrite.left, rewrite.right)
            if ends[1 - side] == "all_reduce" and ends[side] in ops[side] and ends[side] != "broadcast":
                if sense.same_phase and "all_reduce" in ops[1 - side]:
                    mixed(found, sense, side, rewrite)
    for rewrite in ONE_FOR_ONE:
        if rewrite.left in ops[0] and rewrite.right in ops[1] and (sense.same_phase or rewrite.anywhere):
            one_to_one(found, sense, rewrite)
            sums(found, sense, rewrite)
            regrouped(found, sense, rewrite)
    if all({"reduce_scatter", "all_reduce"} & {atom.op for atom in found.open(side)} for side in (0, 1)):
        sums_over_axes(found, sense)


def take(
    found: Match, side: int, op: str, amount: int, sense: Sense, fits: Callable[[Atom], bool], near: Atom
) -> list[Atom]:
    """Open atoms of this op that have this amount, one alone or several together; [] where there are none.

    near: the atom that they are to stand for, or beside: its kind is theirs.
    """
    several = [
        atom
        for atom in (found.open(side, op) if found.steps > 0 else ())
        if sense.kind(atom) == sense.kind(near) and agree(atom.moves, near.moves) and fits(atom)
    ]
    found.steps -= len(several) // 16
    if one := next((atom for atom in several if sense.amount(atom) == amount), None):
        return [one]
    return [several[i] for i in found.subset(cumulative(map(sense.amount, several)), amount)]


def halves(found: Match, sense: Sense, side: int) -> None:
    """An all_reduce of `side`, for which a reduce_scatter and then an all_gather of the same tensor stand."""
    rule = ("decomposed_all_reduce", "recomposed_all_reduce")[side]
    for one in found.open(side, "all_reduce"):
        while one.left:

            def of_one(atom: Atom, one: Atom = one) -> bool:
                return same_ranks(atom, one) and same_work(atom, one) and atom.moves != "parameter"

            scattered = take(found, 1 - side, "reduce_scatter", sense.amount(one), sense, of_one, one)
            last = max((atom.index for atom in scattered), default=0)

            def after(atom: Atom, last: int = last, first: list[Atom] = scattered, one: Atom = one) -> bool:
                phase, shape = first[0].record.phase, first[0].shape
                known = agree(shape, atom.shape) or len(first) > 1
                return atom.index > last and atom.record.phase == phase and known and of_one(atom, one)

            gathered = take(found, 1 - side, "all_gather", sense.amount(one), sense, after, one) if scattered else []
            if not gathered:
                break
            pair(found, side, [one], [*scattered, *gathered], [rule])


def pair(found: Match, side: int, mine: Sequence[Atom], theirs: Sequence[Atom], rules: Sequence[str]) -> None:
    """`Match.pair` with `mine` on this side."""
    found.pair(*((mine, theirs) if side == 0 else (theirs, mine)), rules)


def mixed(found: Match, sense: Sense, side: int, rewrite: Rewrite) -> None:
    """One flat collective of `side`, for which several of its op and some all_reduces stand, as for short vectors."""
    op, left = (rewrite.left, rewrite.right)[side], -1
    waiting = [one for one in found.open(side, op) if len(one.shape or ()) < 2]
    while left != len(waiting):  # of what is left after the others, there may be few enough to try all
        left = len(waiting)
        for one in waiting:
            several = [
                atom
                for kind in (op, "all_reduce")
                for atom in found.open(1 - side, kind)
                if sense.kind(atom) == sense.kind(one) and same_ranks(atom, one) and same_work(atom, one)
            ]
            chosen = [several[i] for i in found.subset(cumulative(map(sense.amount, several)), sense.amount(one))]
            if {atom.op for atom in chosen} == {op, "all_reduce"}:
                pair(found, side, [one], chosen, [rewrite.rule])
        waiting = [one for one in waiting if one.left]


def joined_axes(found: Match, sense: Sense, side: int) -> None:
    """An all_reduce of `side` over several axes, for which one over each axis stands, of the same tensor."""
    there: dict[tuple[Any, ...], list[Atom]] = defaultdict(list)
    for atom in found.open(1 - side, "all_reduce"):
        there[sense.amount(atom), sense.kind(atom)].append(atom)
    for one in found.open(side, "all_reduce"):
        while one.left:
            by_ranks: dict[object, Atom] = {}
            for atom in there.get((sense.amount(one), sense.kind(one)), ()):
                if atom.left and same_work(atom, one) and (atom.record.group_size or 0) > 1:
                    by_ranks.setdefault((atom.ranks, atom.record.group_size), atom)
            chosen = next(products(one, list(by_ranks.values())), None)
            if chosen is None:
                break
            pair(found, side, [one], chosen, ["joined_axes"])


def products(one: Atom, factors: Sequence[Atom]) -> Iterator[tuple[Atom, ...]]:
    """Atoms over axes whose product is that of one atom."""
    for count in (2, 3, 4):
        for chosen in combinations(factors[:8], count):
            sizes = [atom.record.group_size for atom in (one, *chosen)]
            if is_product(one.ranks, [atom.ranks for atom in chosen], sizes):
                yield chosen


def scattered_first(found: Match, sense: Sense, side: int) -> None:
    """A reduce_scatter of `side` and an all_reduce of its shard over another axis; for them one over both axes."""
    for scatter in found.open(side, "reduce_scatter"):
        size = scatter.record.group_size or 0
        for shard in found.open(side, "all_reduce") if size > 1 else ():
            if not scatter.left:
                break
            if not shard.left or sense.kind(shard) != sense.kind(scatter) or not same_work(shard, scatter):
                continue
            if sense.amount(shard) * size != sense.amount(scatter):
                continue

            def over_both(atom: Atom, shard: Atom = shard) -> bool:
                sizes = [a.record.group_size for a in (atom, scatter, shard)]
                return is_product(atom.ranks, [scatter.ranks, shard.ranks], sizes) and same_work(atom, scatter)

            whole = take(found, 1 - side, "all_reduce", sense.amount(scatter), sense, over_both, scatter)
            if whole:
                pair(found, side, [scatter, shard], whole, ["reduced_before_scattered"])


def reduced_whole(found: Match, sense: Sense, side: int) -> None:
    """An all_reduce of a shard on `side`, for which one of the whole tensor stands, that is scattered elsewhere."""
    scatters = {
        (atom.record.group_size, atom.ranks): atom for atom in found.sides[1 - side] if atom.op == "reduce_scatter"
    }
    for size in dict.fromkeys(size for size, _ in scatters if size and size > 1):
        for shard in found.open(side, "all_reduce"):

            def over_same(atom: Atom, shard: Atom = shard) -> bool:
                return same_ranks(atom, shard) and same_work(atom, shard)

            of_other_axes = any(s == size and (ranks is None or ranks != shard.ranks) for s, ranks in scatters)
            whole = take(found, 1 - side, "all_reduce", sense.amount(shard) * size, sense, over_same, shard)
            if whole and of_other_axes and not any(equals(found, one, sense) for one in whole):
                pair(found, side, [shard], whole, ["reduced_before_scattered"])
