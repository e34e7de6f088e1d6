"""Gradients that are summed over several axes of a mesh, followed tensor by tensor through a compiled program.

Each tensor is summed once over each axis. A compiler chooses for every tensor where its shard is cut out on the way,
and which axes it sums over at once, so that sums of one size may be of whole tensors and of shards of others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from shardiff.diff.alignment import Match, cumulative, subset_with_sum
from shardiff.diff.atoms import UNIT, Atom, is_product, kind_of
from shardiff.diff.ticks import pipeline

Axis = tuple[Any, int]  # who takes part, and how many
Axes = frozenset[Axis]
MOST_AXES = 4  # of which all subsets are tried


@dataclass
class Chain:
    """The sums of one tensor: over the axis that scatters it, perhaps with others, and over the rest of them.

    axes: of each of the sums, the first of which is of the whole tensor.
    """

    sums: list[Atom]
    axes: list[Axes]

    def sent(self, axis: Axis) -> int:
        """Elements of the tensor, or of its shard, that are summed over an axis."""
        return sum(atom.elements for atom, over in zip(self.sums, self.axes, strict=True) if axis in over)


def tensor_by_tensor(found: Match, side: int) -> None:
    """Sums of gradients of the other side, for which `side`, a compiled program, has a chain of sums of each tensor.

    Over every axis, as much must be summed on both sides, tensors counted whole. On the other side, all tensors are
    summed over an axis whole, or all as shards of the axis that scatters them. In a pipeline's loop a chain may be in
    every tick. Where other rules are enough, it is only noted of which sums are of gradients.
    """
    named = [atom for atom in sums(found, 1 - side) if atom.moves == "gradient"]
    written: dict[Axis, list[Atom]] = defaultdict(list)
    for atom in named:
        written[atom.ranks, atom.record.group_size or 0].append(atom)
    if any(atom.record.times != 1 for atom in named):
        return
    if len(written) == 1:
        beside_activations(found, side, named)
    if not 1 < len(written) <= MOST_AXES:
        return
    ticks, _ = pipeline(found) or (1, 1)
    # Who sums over an axis what is larger than anything written over it, whole or as a shard, sums no gradient.
    factor = max(size for _, size in written)
    most = {axis: factor * max(atom.elements for atom in atoms) for axis, atoms in written.items()}
    over = axes_of(found, side, most, (1, ticks))
    inner_first = sorted(written, key=lambda axis: all(atom.op != "reduce_scatter" for atom in written[axis]))
    for some_apart, inner in product((False, True), inner_first):
        chains = list(chains_of(over, frozenset(written), inner))
        if not chains or not all(kind_of(a.dtype) == kind_of(named[0].dtype) for chain in chains for a in chain.sums):
            continue
        theirs = written
        if some_apart:
            theirs = {axis: atoms if axis == inner else apart(chains, atoms, axis) for axis, atoms in written.items()}
        rules = same_tensors(chains, theirs, inner, side)
        if rules is None or (some_apart and not rules):
            continue
        mine = [atom for chain in chains for atom in chain.sums]
        gradients = set(map(id, mine))
        for atom in (atom for atoms in over.values() for atom in atoms):
            atom.moves = "gradient" if id(atom) in gradients else "activation"
        if rules:
            used = [*mine, *(atom for atoms in theirs.values() for atom in atoms)]
            if len({atom.dtype for atom in used}) > 1:
                rules.add("dtype")
            if any(atom.record.times > 1 for atom in used):
                rules.add("reduced_every_tick")
            found.link([(atom, atom.left) for atom in used], rules)
        return


def beside_activations(found: Match, side: int, named: Sequence[Atom]) -> None:
    """Note which sums over the one axis are of gradients, if those of activations can be told by their sizes.

    There must be one for each that the other side has, those of most dims first, and the rest as much as all gradients.
    """
    mine = [a for a in sums(found, side) if a.ranks == named[0].ranks and a.record.times == 1 and a.moves is None]
    theirs = [a for op in ("reduce_scatter", "all_reduce") for a in found.open(1 - side, op)]
    theirs = [a for a in theirs if a.moves == "activation" and a.record.phase == "backward" and a.elements > UNIT]
    rest = sorted(mine, key=lambda atom: -len(atom.shape or ()))
    activations: list[Atom] = []
    for other in theirs:
        if other.ranks == named[0].ranks:
            one = next((a for a in rest if a.elements == other.elements), None)
            if one is None:
                return
            rest.remove(one)
            activations.append(one)
    if activations and sum(a.elements for a in rest) == sum(a.elements for a in named):
        for atom in rest:
            atom.moves = "gradient"
        for atom in activations:
            atom.moves = "activation"


def sums(found: Match, side: int) -> Iterator[Atom]:
    """Sums of the backward pass that may be of gradients and have no counterpart yet."""
    for op in ("reduce_scatter", "all_reduce"):
        for atom in found.open(side, op):
            summed = atom.reduction in (None, "sum") and not atom.gathers and atom.moves in (None, "gradient")
            if summed and atom.record.phase == "backward" and atom.elements > UNIT and atom.ranks is not None:
                yield atom


def axes_of(found: Match, side: int, most: Mapping[Axis, int], times: Sequence[int]) -> Mapping[Axes, list[Atom]]:
    """The sums of a side that run so often, by the axes over which they are, alone or together.

    most: elements of the largest that there may be over each axis.
    """
    subsets = [frozenset(some) for count in range(1, len(most) + 1) for some in combinations(most, count)]
    over: dict[Axes, list[Atom]] = defaultdict(list)
    known: dict[Axis, Axes | None] = {}
    for atom in sums(found, side):
        among = atom.ranks, atom.record.group_size or 0
        if among not in known:
            known[among] = next((some for some in subsets if is_over(among, list(some))), None)
        some = known[among]
        if some and atom.left == atom.record.times in times and all(atom.elements <= most[axis] for axis in some):
            over[some].append(atom)
    return over


def is_over(among: Axis, axes: Sequence[Axis]) -> bool:
    """Whether ranks are those of one axis, or of the product of several."""
    if len(axes) == 1:
        return among == axes[0]
    return is_product(among[0], [ranks for ranks, _ in axes], [among[1], *(size for _, size in axes)])


def chains_of(over: Mapping[Axes, list[Atom]], axes: Axes, inner: Axis) -> Iterator[Chain]:
    """A chain for each tensor that is summed over the inner axis; the largest first.

    Of sums of two sizes that fit, the larger is taken, which no smaller tensor can use. So what is left for the others
    does not depend on the order among tensors of one size.
    """
    pool: dict[tuple[Axes, int], list[Atom]] = defaultdict(list)
    for some, atoms in over.items():
        for atom in atoms if inner not in some else ():
            pool[some, atom.elements].append(atom)
    bases = [(atom, some) for some, atoms in over.items() if inner in some for atom in atoms]
    for base, some in sorted(bases, key=lambda one: -one[0].elements):
        rest = sorted(axes - some, key=lambda axis: (axis[1], str(axis[0])))
        wanted = [frozenset(part) for count in range(len(rest), -1, -1) for part in combinations(rest, count)]
        for part in wanted:  # over all other axes, or over as many as there are sums for
            if (more := completed(base, part, pool, inner[1])) is not None:
                yield Chain([base, *(atom for atom, _ in more)], [some, *(over_these for _, over_these in more)])
                break


def completed(
    base: Atom, rest: Axes, pool: Mapping[tuple[Axes, int], list[Atom]], size: int
) -> list[tuple[Atom, Axes]] | None:
    """Sums over the rest of the axes, of the whole tensor or of its shard, taken out of the pool; None if one lacks."""
    if not rest:
        return []
    first, *others = sorted(rest, key=lambda axis: (axis[1], str(axis[0])))
    for count in range(len(others), -1, -1):
        for more in combinations(others, count):
            some = frozenset((first, *more))
            for parts in (1, size):
                here = pool.get((some, base.elements // parts), []) if base.elements % (parts * UNIT) == 0 else []
                fitting = [a for a in here if fits(base, a, parts)]
                if not fitting:
                    continue
                atom = next((a for a in fitting if is_slice(base, a, parts)), fitting[0])
                here.remove(atom)
                if (after := completed(base, rest - some, pool, size)) is not None:
                    return [(atom, some), *after]
                here.append(atom)
    return None


def is_slice(base: Atom, atom: Atom, parts: int) -> bool:
    """Whether this is one of so many parts along the first dim, as sums are usually scattered."""
    if not base.shape or not atom.shape:
        return False
    return base.shape[0] == atom.shape[0] * parts and base.shape[1:] == atom.shape[1:]


def fits(base: Atom, atom: Atom, parts: int) -> bool:
    """Whether this can be the same tensor, or one of so many parts of it along a dim, by the shapes that are known.

    Dims other than the first may have been joined or split in between.
    """
    if base.shape is None or atom.shape is None:
        return True
    whole, part = ([length for length in shape if length > 1] for shape in (base.shape, atom.shape))
    if len(whole) != len(part):
        return bool(whole) and bool(part) and whole[0] == part[0] * parts
    differ = [(mine, other) for mine, other in zip(whole, part, strict=True) if mine != other]
    return not differ if parts == 1 else len(differ) == 1 and differ[0][0] == differ[0][1] * parts


def apart(chains: Sequence[Chain], written: Sequence[Atom], axis: Axis) -> list[Atom]:
    """The sums over an axis but for some that are as much as the chains lack, and have to be explained otherwise."""
    lack = sum(atom.elements for atom in written) - sum(chain.sums[0].elements for chain in chains if chain.sent(axis))
    spare = set(subset_with_sum(cumulative(atom.elements for atom in written), lack))
    return [atom for i, atom in enumerate(written) if i not in spare]


def same_tensors(
    chains: Iterable[Chain], written: Mapping[Axis, list[Atom]], inner: Axis, side: int
) -> set[str] | None:
    """The rules under which chains sum up what is written, empty if other rules are enough; None if they do not."""
    chains, rules, outer = list(chains), set[str](), set[str]()
    for axis, atoms in written.items():
        mine = [chain for chain in chains if chain.sent(axis)]
        whole, there = sum(chain.sums[0].elements for chain in mine), sum(atom.elements for atom in atoms)
        if axis == inner:
            if whole != there:
                return None
            continue
        if whole not in (there, there * inner[1]):
            return None
        here = sum(chain.sent(axis) for chain in mine)
        if here != there:
            more_on_the_right = (here > there) == (side == 1)
            outer.add("reduced_before_scattered" if more_on_the_right else "scattered_before_reduced")
    sides = [
        {atom.op for chain in chains for atom in chain.sums[:1]},
        {atom.op for atom in written[inner]},
    ]
    left, right = sides if side == 0 else sides[::-1]
    if left != right:
        rules.add("unfused_reduce_scatter" if "reduce_scatter" in left else "fused_reduce_scatter")
    if any(len(axes) > 1 for chain in chains for axes in chain.axes):
        rules.add("joined_axes")
    looped = any(atom.record.times > 1 for chain in chains for atom in chain.sums)
    return rules | outer if outer or (looped and "joined_axes" in rules) else set()
