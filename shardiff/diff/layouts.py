"""What a partitioner decides: which operand it gathers, where it sums, between which layouts it moves tensors."""

from __future__ import annotations

from collections import Counter

from shardiff.diff.alignment import Match
from shardiff.diff.atoms import UNIT, Atom, by_compiler, kind_of, overlooked, same_ranks, same_work

WHOLE = ("top_k", "approx_top_k", "sort")  # operations that some partitioners do not split


def row_of(found: Match, of: list[Atom], rule: str) -> None:
    """All that is left of these atoms as one row under a rule."""
    found.link([(atom, atom.left) for atom in of], [rule], extra=True)


def weights(found: Match, side: int) -> None:
    """Weights that one side gathers, and whose gradients it scatters, where the other exchanges activations.

    Where the other side gathers weights over these ranks too, it does not do one instead of the other.
    """
    gathers, others = ([a for a in found.open(s, "all_gather") if a.moves == "parameter"] for s in (side, 1 - side))
    for first in gathers:
        if not first.left or any(same_ranks(a, first) for a in others):
            continue
        mine = [a for a in gathers if a.left and same_ranks(a, first)]
        sizes = {a.elements for a in mine}
        scattered = [
            a
            for op in ("reduce_scatter", "all_reduce")
            for a in found.open(side, op)
            if a.record.phase == "backward" and a.elements in sizes and same_ranks(a, first) and a.moves != "activation"
        ]
        theirs = [
            a
            for op in ("all_gather", "reduce_scatter", "all_reduce")
            for a in found.open(1 - side, op)
            if same_ranks(a, first) and a.moves not in ("parameter", "gradient")
            if a.op == "all_gather"
            or a.elements not in sizes
            or a.record.phase == "forward"  # else a weight's gradient
        ]
        if theirs and (first.record.computation is not None or any(by_compiler(a) for a in theirs)):
            row_of(found, [*mine, *scattered, *theirs], "weight_gathered")


def tokens(found: Match, side: int) -> None:
    """Gathers and scattered sums of `side`, one for each all_to_all of the other over the same ranks in that phase.

    What stands for an exchange moves all tokens where it moved some, so it is no smaller, and of the same kind. What is
    smaller goes with the tokens: where they go, and with which weight they come back.
    """
    exchanges: list[Atom] = []
    for theirs in found.open(1 - side, "all_to_all"):
        while theirs.left:
            mine = [
                a
                for op in ("all_gather", "reduce_scatter", "all_reduce")
                for a in found.open(side, op)
                if a.record.phase == theirs.record.phase and same_ranks(a, theirs) and by_compiler(a)
                if a.elements >= theirs.elements and kind_of(a.dtype) == kind_of(theirs.dtype)
                if a.moves not in ("parameter", "gradient")
            ]
            if not mine:
                break
            largest = max(mine, key=lambda a: a.elements)
            times = min(largest.left, theirs.left)
            rules = {"gather_and_scatter"} | (overlooked(largest, theirs) & {"dtype", "more_groups"})
            found.link([(largest, times), (theirs, times)], rules, extra=True)
            exchanges.append(theirs)
    for theirs in exchanges:
        for op in ("all_gather", "all_reduce"):
            for a in found.open(side, op):
                beside = (
                    a.record.phase == theirs.record.phase and a.elements < theirs.elements and by_compiler(a)
                )
                last = (a.detail or "").rpartition("/")[2]
                if beside and same_ranks(a, theirs) and a.moves is None and last != "top_k":
                    found.link([(a, a.left)], ["gather_and_scatter"], extra=True)


def resharded(found: Match, side: int) -> None:
    """Moves between layouts that a compiler inserted: all_to_alls, and gathers over the same ranks beside them."""
    moves = [a for a in found.open(side, "all_to_all") if by_compiler(a)]
    phases = {a.record.phase for a in moves}
    gathers = [
        a
        for a in found.open(side, "all_gather")
        if a.record.phase in phases
        and a.moves is None
        and by_compiler(a)
        and any(same_ranks(a, b) for b in moves)
    ]
    for atom in (*moves, *gathers):
        found.link([(atom, atom.left)], ["resharded"], extra=True)


def early_sums(found: Match, phase: str) -> None:
    """Sums that a partitioner takes right after a product, where the other side goes on and sums something smaller.

    What comes between is linear, so the sum may be taken before it or after it. Those of one size are the counterparts
    of each other, and those in one call, which do not wait for one another, are of one. Of the others this side must
    have as many as the other has, at least.
    """
    for side in (0, 1):
        open_sums = [
            [
                a
                for op in ("all_reduce", "reduce_scatter")
                for a in found.open(s, op)
                if a.record.phase == phase and a.moves not in ("parameter", "gradient") and a.elements > UNIT
            ]
            for s in (side, 1 - side)
        ]
        products = [a for a in open_sums[0] if a.op == "all_reduce" and of_product(a)]
        for ranks in dict.fromkeys(a.ranks for a in products):
            one = next(a for a in products if a.ranks == ranks)
            here, there = ([a for a in each if same_ranks(a, one) and same_work(a, one)] for each in open_sums)
            sizes = Counter(b.elements for b in there)
            equal = Counter(elements for elements, _ in {(a.elements, a.index) for a in here}) & sizes
            mine = [a for a in products if a in here and not sizes[a.elements]]
            theirs = []
            for b in there:
                if equal[b.elements]:
                    equal[b.elements] -= 1
                elif kind_of(b.dtype) == kind_of(one.dtype):
                    theirs.append(b)
            if 0 < len(theirs) <= len(mine) and all(a.elements > b.elements for a in mine for b in theirs):
                for a, b in zip(mine, theirs, strict=False):
                    found.pair(*(([a], [b]) if side == 0 else ([b], [a])), ["summed_early"])


def of_product(atom: Atom) -> bool:
    """Whether a partitioner sums the one result of a product, which is no matrix."""
    named = (atom.detail or "").endswith("dot_general")
    return named and by_compiler(atom) and len(atom.shape or ()) > 2


def ungated(found: Match, side: int) -> None:
    """Sums of gradients that the other side needs not, as it has summed early, and then works with whole values."""
    nodes = {node for link in found.links if "summed_early" in link.rules for node in link.nodes}
    early = [a for a in found.sides[1 - side] if (a.side, a.index) in nodes and by_compiler(a)]
    for extra in found.open(side, "all_reduce") if early else ():
        twin = next((a for a in early if same_ranks(a, extra) and same_work(a, extra)), None)
        if twin and extra.record.phase == "backward" and extra.record.computation is None:
            if extra.moves != "activation" and extra.elements < twin.elements:
                found.link([(extra, extra.left)], (), extra=True)
                found.join([extra, twin], ["summed_early"])


def run_whole(found: Match, side: int) -> None:
    """Gathers for an operation that a partitioner does not split."""
    for extra in found.open(side, "all_gather"):
        last = (extra.detail or "").rpartition("/")[2].partition(".")[0]
        if extra.moves is None and by_compiler(extra) and last in WHOLE:
            found.link([(extra, extra.left)], ["run_whole"], extra=True)
