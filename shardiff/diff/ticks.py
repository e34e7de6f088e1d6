"""What a pipeline in an SPMD program sends in every tick: also in those of the bubble, and what is needed once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from shardiff.diff.alignment import Match
from shardiff.diff.atoms import Atom, kind_of, overlooked, rides_in_a_loop, same_ranks, same_work, tally
from shardiff.diff.rewrites import products
from shardiff.diff.rings import ring_size


def explain(found: Match, extra: Atom, by: Atom, rule: str) -> None:
    """All that is left of `extra` is explained by another atom, in whose row it comes to stand."""
    rules = {rule} | (overlooked(extra, by) - {"moved"})
    found.link([(extra, extra.left)], (), extra=True)
    found.join([extra, by], rules)


def gradients_every_tick(found: Match) -> None:
    """Sums of gradients in the loop of a pipeline: each is needed once, and the other ticks repeat it.

    For that, the other side must reduce of gradients over these ranks in total as much as one tick does, beside what it
    sums for every microbatch; else an instruction in a loop may stand for as many calls as the loop has trips, one for
    each layer, say.
    """
    shape = pipeline(found)
    if shape is None:
        return
    count, microbatches = shape
    for side in (0, 1):
        groups: dict[Any, tuple[list[Atom], list[Atom]]] = defaultdict(lambda: ([], []))
        for s in (0, 1):
            for op in ("all_reduce", "reduce_scatter"):
                for atom in found.by_op[s].get(op, ()):
                    if atom.record.phase == "backward" and atom.ranks is not None:
                        groups[atom.ranks, kind_of(atom.dtype)][s].append(atom)
        for sides in groups.values():
            theirs = apart([a for a in sides[1 - side] if a.moves == "gradient"], found, side)
            beside = [a for a in sides[1 - side] if a.moves != "gradient"]
            mine = without(sides[side], beside, microbatches)
            looped = [a for a in mine or () if rides_in_a_loop(a.record) and a.left == count]
            needed = sum(a.elements * a.record.times for a in theirs)
            once = sum(a.elements * (1 if a in looped else a.record.times) for a in mine or ())
            if looped and needed == once and not any(rides_in_a_loop(a.record) for a in theirs):
                for atom in looped:
                    found.link([(atom, atom.left - 1)], ["reduced_every_tick"], extra=True)
                if beside:  # which may be as large as a gradient, and is not to be taken for one
                    found.link([(a, a.left) for a in (*theirs, *(mine or ()))], ["reduced_every_tick"])


def parameters_every_tick(found: Match) -> None:
    """Gathers of parameters in the loop of a pipeline, together with those before it, if both sides gather as much.

    The other side must gather nothing but parameters over these ranks in the forward pass, each once.
    """
    shape = pipeline(found)
    for side in (0, 1) if shape else ():
        groups: dict[Any, tuple[list[Atom], list[Atom]]] = defaultdict(lambda: ([], []))
        for s in (0, 1):
            for atom in found.open(s, "all_gather"):
                if atom.record.phase == "forward" and atom.ranks is not None:
                    groups[atom.ranks, kind_of(atom.dtype)][s].append(atom)
        for sides in groups.values():
            mine, theirs = sides[side], sides[1 - side]
            looped = [a for a in mine if rides_in_a_loop(a.record)]
            once = all(a.left == (shape[0] if a in looped else 1) for a in mine) if shape else False
            needed = sum(a.elements for a in theirs)
            if not looped or not once or needed != sum(a.elements for a in mine):
                continue
            if all(a.moves == "parameter" and a.left == 1 for a in theirs):
                types = {"dtype"} if len({a.dtype for a in (*mine, *theirs)}) > 1 else set[str]()
                found.link([(a, a.left) for a in (*mine, *theirs)], types | {"gathered_every_tick"})


def apart(theirs: Sequence[Atom], found: Match, side: int) -> list[Atom]:
    """The sums but for those which `side` takes in a loop over more ranks at once, together with another axis."""
    of = theirs[0].ranks if theirs else None
    joined = Counter(
        a.elements
        for a in found.by_op[side].get("all_reduce", ())
        if a.record.phase == "backward" and rides_in_a_loop(a.record) and a.ranks not in (None, of) and of
        if all(any(inside <= group for group in a.ranks) for inside in of)
    )
    alone = []
    for atom in theirs:
        if joined[atom.elements]:
            joined[atom.elements] -= 1
        else:
            alone.append(atom)
    return alone


def without(of: Sequence[Atom], beside: Sequence[Atom], microbatches: int) -> list[Atom] | None:
    """The atoms but for one in the loop for each sum that the other side takes for every microbatch; None if it lacks.

    Of several of one size, those of most dims: a gradient has no dims for samples.
    """
    rest = sorted(of, key=lambda atom: -len(atom.shape or ()))
    for elements, times in tally((a.elements, a.record.times) for a in beside).items():
        alike = [a for a in rest if a.elements == elements and rides_in_a_loop(a.record)]
        if times % microbatches or len(alike) < times // microbatches:
            return None
        rest = [a for a in rest if a not in alike[: times // microbatches]]
    return rest


def ticks(found: Match, side: int) -> None:
    """What a pipeline runs in the ticks of the bubble too, or in every tick where it is needed once."""
    for extra in found.open(side, "collective_permute"):
        if extra.matched and extra.record.times > 1:
            found.link([(extra, extra.left)], ["bubble_ticks"], extra=True)
    shape = pipeline(found)
    if shape is None:
        return
    count, microbatches = shape
    groups: dict[tuple[Any, ...], list[Atom]] = defaultdict(list)
    for atom in found.sides[side]:
        groups[atom.op, atom.elements, kind_of(atom.dtype), atom.ranks, atom.record.phase].append(atom)
    for group in groups.values():
        needed, run = sum(a.matched for a in group), sum(a.record.times for a in group)
        left, matched = [a for a in group if a.left], [a for a in group if a.matched]
        if not left or not matched or group[0].op == "collective_permute":
            continue
        if run * microbatches <= needed * count:
            rule = "bubble_ticks"
        elif run == needed * count and all(rides_in_a_loop(a.record) for a in group):
            rule = "gathered_every_tick" if group[0].op == "all_gather" else "reduced_every_tick"
        else:
            continue
        for extra in left:
            explain(found, extra, extra if extra.matched else matched[0], rule)
    for extra in found.open(side, "all_reduce"):  # the shares of all ticks in one call
        parts = [a for a in found.open(1 - side, "all_reduce") if kind_of(a.dtype) == kind_of(extra.dtype)]
        parts = [a for a in parts if same_work(extra, a) and extra.elements == a.elements * count]
        whole = next(([a] for a in parts if same_ranks(extra, a)), None)
        by_axis = {(a.ranks, a.record.group_size): a for a in reversed(parts)}
        several = whole or next(products(extra, list(by_axis.values())), None)
        if several and extra.record.computation:
            rules = ["reduced_every_tick"] if whole else ["reduced_every_tick", "joined_axes"]
            found.pair(*((several, [extra]) if side else ([extra], several)), rules)


def pipeline(found: Match) -> tuple[int, int] | None:
    """(ticks, microbatches) of a pipeline, by the permutes between its stages; None where there is none.

    p stages run m microbatches in m + p - 1 ticks. A loop permutes in all of them, separate calls in all but the last.
    """
    for side in (0, 1):
        phases: dict[str, list[Atom]] = defaultdict(list)
        for atom in found.sides[side]:
            stays = any(source == target for source, target in atom.record.edges or ())  # as no stage sends to itself
            if atom.op == "collective_permute" and not stays:
                phases[atom.record.phase].append(atom)
        for every in phases.values():
            onward = [atom for atom in every if not ring_size(atom.record.edges or ())]
            permutes = onward or every  # what goes around a ring inside a stage is not passed on to the next
            num_stages = max(len(stages(atom)) for atom in permutes)
            looped = [atom.record.times for atom in permutes if rides_in_a_loop(atom.record)]
            count = max(looped) if looped else sum(atom.record.times for atom in permutes) + 1
            if num_stages > 1 and count - num_stages + 1 >= 1:
                return count, count - num_stages + 1
    return None


def stages(permute: Atom) -> set[int]:
    """The ranks that the longest chain of a permute's edges passes through."""
    after = dict(permute.record.edges or ())
    longest: set[int] = set()
    for start in after:
        chain = [start]
        while chain[-1] in after and after[chain[-1]] not in chain:
            chain.append(after[chain[-1]])
        longest = max(longest, set(chain), key=len)
    return longest
