"""What a partitioner decides: which operand it gathers, where it sums, between which layouts it moves tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice, product

from shardiff.diff.alignment import Match
from shardiff.diff.atoms import (
    UNIT,
    Atom,
    asked_for,
    by_compiler,
    kind_of,
    operation,
    overlooked,
    rides_in_a_loop,
    same_ranks,
    same_work,
    tally,
)
from shardiff.diff.ticks import pipeline

WHOLE = ("top_k", "approx_top_k", "sort")  # operations that some partitioners do not split


def row_of(found: Match, of: list[Atom], rule: str) -> None:
    """All that is left of these atoms as one row under a rule."""
    found.link([(atom, atom.left) for atom in of], [rule], extra=True)


def weights(found: Match, side: int, exact: bool = False) -> None:
    """Weights that one side gathers, and whose gradients it scatters, where the other exchanges activations.

    Where the other side gathers weights over these ranks too, it does not do one instead of the other; but it may
    gather one vector, such as a bias, for each weight that stays where it is. exact: only where all that is gathered
    is scattered, and the other side has sums in the forward pass, which are of activations.
    """
    gathers = [a for a in found.open(side, "all_gather") if is_weight(found, a)]
    others = [a for a in found.open(1 - side, "all_gather") if is_weight(found, a) or of_argument(a)]
    for first in gathers:
        if not first.left:
            continue
        mine = [a for a in gathers if a.left and same_ranks(a, first)]
        vectors = [a for a in others if a.left and same_ranks(a, first)]
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
            if same_ranks(a, first) and a.moves not in ("parameter", "gradient") and a not in vectors
            if a.elements > UNIT  # which the loss is not
            if a.op == "all_gather"
            or a.elements not in sizes
            or a.record.phase == "forward"  # else a weight's gradient
        ]
        if exact:
            scattered, rest = gradients_of(found, mine)
            forward = [a for a in theirs if a.op != "all_gather" and a.record.phase == "forward"]
            amounts = [sum(a.elements * a.left for a in some) for some in (rest, theirs)]
            if vectors or not forward or not scattered or amounts[0] not in (0, amounts[1]):
                continue
            scattered += rest
        derived = first.record.computation is not None or any(by_compiler(a) for a in theirs)
        if (theirs and derived) if not vectors else stays(mine, vectors, theirs):
            row_of(found, [*mine, *scattered, *theirs, *vectors], "weight_gathered")


def gradients_of(found: Match, gathered: Sequence[Atom]) -> tuple[list[Atom], list[Atom]]:
    """A scattered or reduced sum of the backward pass for each of these weights, as large as it is, and what else is
    gathered or scattered over these ranks; no sums if one is missing."""
    sizes = tally((a.elements, a.left) for a in gathered)
    sums, rest = list[Atom](), list[Atom]()
    for op in ("reduce_scatter", "all_reduce", "all_gather"):
        for a in found.open(gathered[0].side, op):
            if not same_ranks(a, gathered[0]) or a in gathered or a.elements <= UNIT:
                continue
            if op != "all_gather" and a.record.phase == "backward" and sizes[a.elements] >= a.left:
                sizes[a.elements] -= a.left
                sums.append(a)
            else:
                rest.append(a)
    return ([] if any(sizes.values()) else sums), rest


def is_weight(found: Match, gather: Atom) -> bool:
    """Whether an all_gather is of weights: so it says, or as large a gradient is scattered over the same ranks."""
    return gather.moves == "parameter" or (
        gather.moves is None
        and gather.record.computation is None
        and any(
            a.moves == "gradient" and a.elements == gather.elements and same_ranks(a, gather)
            for a in found.by_op[gather.side].get("reduce_scatter", ())
        )
    )


def of_argument(gather: Atom) -> bool:
    """Whether an all_gather that a partitioner put there has the name of an argument of the program."""
    return gather.detail is not None and "/" not in gather.detail and not asked_for(gather)


def stays(units: Sequence[Atom], vectors: Sequence[Atom], sums: Sequence[Atom]) -> bool:
    """Whether for each unit of a weight and a vector, gathered before its use, there is that vector, and a compiled sum
    Y[B, F] of products with the weight's parts: the unit has D F + F elements."""
    units = [a for a in units if a.record.phase == "forward"]
    shapes = [a.shape for a in sums if a.op == "reduce_scatter" and a.shape and a.record.computation is not None]
    if not len(units) == len(vectors) == len(sums) == len(shapes):
        return False
    features = [shape[-1] * UNIT for shape in shapes]
    return all(
        v.elements == f and u.elements > v.elements and (u.elements - v.elements) % f == 0
        for u, v, f in zip(units, vectors, features, strict=True)
    )


def samples_gathered(found: Match, side: int) -> None:
    """Sums of weights' gradients, for each of which `side` gathers what the sum is over.

    The gradient of W[D, F] is a product X[B, D]^T Z[B, F] over samples that the ranks have split. For its sum, one side
    gathers Z, and an all_to_all turns a rank's samples of X into all samples of its part of D.
    """
    moves = [a for a in found.open(side, "all_to_all") if not asked_for(a)]
    moves.sort(key=lambda a: (by_compiler(a), a.record.phase != "forward"))  # an argument's own name, then activations
    gathers = [
        a
        for a in found.open(side, "all_gather")
        if a.record.phase == "backward" and a.moves is None and by_compiler(a) and len(a.shape or ()) > 1
    ]
    vectors = [a for a in found.open(side, "all_reduce") if a.record.phase == "backward" and len(a.shape or ()) == 1]
    summed = {a.elements for op in ("reduce_scatter", "all_reduce") for a in found.open(side, op)}
    for op in ("reduce_scatter", "all_reduce") if moves and gathers else ():
        for whole in found.open(1 - side, op):
            if whole.moves != "gradient" or whole.elements in summed:
                continue
            for z, x in product(gathers, moves):
                n, features = x.record.group_size or 1, (z.shape or (1,))[-1]
                rows = z.elements // (features * UNIT)
                depth, rest = divmod(x.elements * n, rows * UNIT)
                beside = whole.elements - depth * features * UNIT
                vector = next((v for v in vectors if v.left and v.elements == beside and same_ranks(v, whole)), None)
                fits = z.left and x.left and same_ranks(z, whole) and same_ranks(x, whole) and not rest
                fits = fits and depth * features * UNIT not in summed  # else this side sums it all the same
                if fits and (beside == 0 or vector):
                    taken = [whole, z, x, *([vector] if beside and vector else [])]
                    found.link([(atom, 1) for atom in taken], ["samples_gathered"])
                    break


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
        for op in ("all_gather", "reduce_scatter", "all_reduce"):
            for a in found.open(side, op):
                beside = a.record.phase == theirs.record.phase and a.elements < theirs.elements and by_compiler(a)
                if beside and same_ranks(a, theirs) and a.moves is None and operation(a) != "top_k":
                    found.link([(a, a.left)], ["gather_and_scatter"], extra=True)


def resharded(found: Match, side: int) -> None:
    """Moves between layouts that a compiler inserted: all_to_alls, and gathers over the same ranks beside them."""
    moves = [a for a in found.open(side, "all_to_all") if by_compiler(a)]
    phases = {a.record.phase for a in moves}
    gathers = [
        a
        for a in found.open(side, "all_gather")
        if a.record.phase in phases and a.moves is None and by_compiler(a) and any(same_ranks(a, b) for b in moves)
    ]
    for atom in (*moves, *gathers):
        found.link([(atom, atom.left)], ["resharded"], extra=True)


def early_sums(found: Match, phase: str) -> None:
    """Sums that a partitioner takes right after a product, where the other side goes on and sums something smaller.

    What comes between is linear, so the sum may be taken before it or after it. Those of one size are the counterparts
    of each other, and those in one call, which do not wait for one another, are of one. Of the others this side must
    have as many as the other has, at least. In the loop of a pipeline one stands for as many as there are microbatches.
    """
    ticks, microbatches = pipeline(found) or (1, 1)

    def calls(atom: Atom) -> int:
        return microbatches if rides_in_a_loop(atom.record) and atom.left == ticks else 1

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
            once = {(a.elements, a.index): calls(a) for a in here}
            equal = tally((elements, count) for (elements, _), count in once.items()) & sizes
            mine = [a for a in products if a in here and not sizes[a.elements]]
            theirs = []
            for b in there:
                if equal[b.elements]:
                    equal[b.elements] -= 1
                elif kind_of(b.dtype) == kind_of(one.dtype):
                    theirs.append(b)
            enough = 0 < len(theirs) <= sum(map(calls, mine))
            if enough and all(a.elements > b.elements for a in mine for b in theirs):
                rest = iter(theirs)
                for a in mine:
                    if some := list(islice(rest, calls(a))):
                        bubble = ["bubble_ticks"] if calls(a) > 1 else []
                        found.link([(a, a.left if bubble else 1), *((b, 1) for b in some)], ["summed_early", *bubble])


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
        if extra.moves is None and by_compiler(extra) and operation(extra) in WHOLE:
            found.link([(extra, extra.left)], ["run_whole"], extra=True)
