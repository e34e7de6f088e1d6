"""What has no counterpart but is explained by a rule: repeated, kept, run in every tick, moved between layouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shardiff.diff.alignment import Match, Node
from shardiff.diff.atoms import (
    UNIT,
    Atom,
    agree,
    by_compiler,
    kind_of,
    same_ranks,
    same_work,
)
from shardiff.diff.layouts import resharded, run_whole, tokens, ungated, weights
from shardiff.diff.rings import around_again
from shardiff.diff.ticks import explain, pipeline, ticks

REMATERIALIZED = ("rematted_computation", "checkpoint", "remat")


def extras(found: Match) -> None:
    """Explain what is open where a rule does; the strictest first."""
    around_again(found, pipeline(found))
    for side in (0, 1):
        ticks(found, side)
    for side in (1, 0):
        repeated(found, side, "gathered_again" if side else "kept", is_gather)
        repeated(found, side, "recomputed" if side else "kept", is_recomputed)
        one_by_one(found, side)
    for explained in (weights, tokens, ungated, run_whole, resharded, global_values):
        for side in (1, 0):
            explained(found, side)


def alike(a: Atom, b: Atom) -> bool:
    """Whether two atoms of one op move as much of the same kind of thing among the same ranks."""
    amounts = a.elements == b.elements and kind_of(a.dtype) == kind_of(b.dtype)
    return a is not b and a.op == b.op and amounts and same_work(a, b) and same_ranks(a, b)


def one_thing(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    """Whether two arrays can be the same, by what is known: what they are, and their shapes; one may be reshaped."""
    (moves, shape), (others, other) = a, b
    long, longer = ([length for length in each or () if length > 1] for each in (shape, other))
    return agree(moves, others) and (None in (shape, other) or long == longer or len(long) != len(longer))


def by_amount(of: Iterable[Atom]) -> dict[tuple[str, int], list[Atom]]:
    """Atoms by their op and their elements."""
    found: dict[tuple[str, int], list[Atom]] = defaultdict(list)
    for atom in of:
        found[atom.op, atom.elements].append(atom)
    return found


def is_gather(extra: Atom, twin: Atom) -> bool:
    """Whether this gathers in the backward pass what was gathered in the forward pass."""
    phases = (extra.record.phase, twin.record.phase)
    return extra.gathers and twin.gathers and phases == ("backward", "forward")


def is_recomputed(extra: Atom, twin: Atom) -> bool:
    """Whether the backward pass repeats a collective of the forward pass, by its name or by its line of source."""
    if extra.record.phase != "backward" or twin.record.phase != "forward" or extra.side != twin.side:
        return False
    if any(word in (extra.record.detail or "") for word in REMATERIALIZED):
        return True
    same_line = extra.record.source is not None and extra.record.source == twin.record.source
    return same_line and extra.record.computation is None  # a derivative has the source of what it is derived from


def things(found: Match) -> dict[int, tuple[Any, Any]]:
    """What each atom moves, and its shape, by its identity: as it says, or as its counterparts say with one voice."""
    at: dict[Node, list[Atom]] = defaultdict(list)
    for side in found.sides:
        for atom in side:
            at[atom.side, atom.index].append(atom)
    told: dict[Node, list[Atom]] = defaultdict(list)
    for link in found.links:
        for node in link.nodes:
            told[node] += [atom for other in link.nodes if other[0] != node[0] for atom in at[other]]

    def voice(said: set[Any]) -> Any:
        return next(iter(said)) if len(said) == 1 else None

    voices = {node: (voice({a.moves for a in there}), voice({a.shape for a in there})) for node, there in told.items()}
    known: dict[int, tuple[Any, Any]] = {}
    for node, atoms in at.items():
        moves, shape = voices.get(node, (None, None))
        known |= {id(a): (a.moves or moves, shape if a.shape is None else a.shape) for a in atoms}
    return known


def repeated(found: Match, side: int, rule: str, fits: Callable[[Atom, Atom], bool]) -> None:
    """What one side sends a second time, and the other keeps. The twins, which are sent once, take turns."""
    turns: dict[int, int] = {}
    matched = by_amount(atom for atom in (*found.sides[1 - side], *found.sides[side]) if atom.matched)
    known = things(found)
    for extra in found.open(side):
        there = matched.get((extra.op, extra.elements), ())
        twins = [twin for twin in there if fits(extra, twin) and alike(extra, twin)]
        twins = [twin for twin in twins if one_thing(known[id(extra)], known[id(twin)])]
        if twins:
            twin = min(twins, key=lambda twin: turns.get(id(twin), 0))
            turns[id(twin)] = turns.get(id(twin), 0) + 1
            explain(found, extra, twin, rule)


def one_by_one(found: Match, side: int) -> None:
    """Sums whose addends one side reduces each by itself and the other adds up first, if a compiler chose so.

    In the backward pass only, where the gradient of what is used several times is such a sum. In a forward pass one sum
    more on either side may as well be one that the other has forgotten.
    """
    rule = "reduced_one_by_one" if side else "added_first"
    matched = by_amount(atom for atom in found.sides[side] if atom.matched)
    for extra in found.open(side):
        if extra.op not in ("all_reduce", "reduce_scatter") or extra.record.phase != "backward":
            continue
        if extra.moves in ("gradient", "parameter"):
            continue
        for twin in matched.get((extra.op, extra.elements), ()):
            same = extra is twin or (  # calls that a trace cannot tell apart are executions of one record
                alike(extra, twin) and agree(extra.shape, twin.shape) and extra.record.phase == twin.record.phase
            )
            partners = [
                a
                for a in partners_of(found, twin)
                if a.moves not in ("gradient", "parameter") and a.elements == extra.elements
            ]
            if same and partners and (by_compiler(extra) or any(by_compiler(a) for a in partners)):
                explain(found, extra, twin, rule)
                break


def partners_of(found: Match, atom: Atom) -> Iterator[Atom]:
    """The atoms of the other side in the links of an atom's record."""
    node = (atom.side, atom.index)
    there = {other for link in found.links if node in link.nodes for other in link.nodes if other[0] != atom.side}
    return (other for other in found.sides[1 - atom.side] if (other.side, other.index) in there)


def global_values(found: Match, side: int) -> None:
    """Sums of a single number in a compiled program, as the loss is, where a traced one sums none over these ranks."""
    traced = all(atom.record.computation is None for atom in found.sides[1 - side])
    theirs = [a for a in found.sides[1 - side] if a.op == "all_reduce" and a.elements == UNIT]
    for atom in found.open(side, "all_reduce") if traced and found.sides[1 - side] else ():
        number = atom.elements == UNIT and kind_of(atom.dtype) == "float" and agree(atom.reduction, "sum")
        if number and atom.record.computation and not any(same_ranks(atom, other) for other in theirs):
            found.link([(atom, atom.left)], ["global_value"], extra=True)
