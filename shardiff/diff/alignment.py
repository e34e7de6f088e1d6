"""The alignment behind a diff: which records of one program are the counterparts of which of the other.

Atoms (see `shardiff.diff.atoms`) are matched from the strictest sense of equal to the loosest; what a match had to
overlook is its rule. Bytes decide, not counts of calls: a compiler may combine.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from shardiff.diff.atoms import Atom, Sense, atoms, likeness, overlooked, same_ranks, same_work
from shardiff.record import Record

Node = tuple[int, int]  # a record: its side, and its index
MOST_STEPS = 1_000_000  # of all searches for sums together, so that none takes minutes


@dataclass(frozen=True)
class Link:
    """All of `left` together stand for all of `right`, under these rules; records by side and index."""

    nodes: tuple[Node, ...]
    rules: frozenset[str]


@dataclass
class Match:
    """What is matched so far. sides: the atoms of the left program, and of the right."""

    sides: tuple[list[Atom], list[Atom]]
    links: list[Link] = field(default_factory=list)
    steps: int = MOST_STEPS
    by_op: tuple[dict[str, list[Atom]], dict[str, list[Atom]]] = field(init=False)

    def __post_init__(self) -> None:
        self.by_op = defaultdict(list), defaultdict(list)
        for side, index in zip(self.sides, self.by_op, strict=True):
            for atom in side:
                index[atom.op].append(atom)

    def link(self, taken: Iterable[tuple[Atom, int]], rules: Iterable[str] = (), extra: bool = False) -> None:
        """These executions of these atoms explain each other. extra: they have no counterpart, and a rule says why."""
        taken = list(taken)
        for atom, times in taken:
            atom.left -= times
            atom.matched += 0 if extra else times
        self.join((atom for atom, _ in taken), rules)

    def join(self, of: Iterable[Atom], rules: Iterable[str]) -> None:
        """The records of these atoms are in one row, under these rules among others."""
        self.links.append(Link(tuple(dict.fromkeys((atom.side, atom.index) for atom in of)), frozenset(rules)))

    def pair(
        self, left: Sequence[Atom], right: Sequence[Atom], rules: Iterable[str] = (), most: int | None = None
    ) -> None:
        """All of `left` stand for all of `right`, as often as each has executions left, or `most` times."""
        times = min([atom.left for atom in (*left, *right)] + ([] if most is None else [most]))
        found = {rule for a in left for b in right for rule in overlooked(a, b)}
        self.link([(atom, times) for atom in (*left, *right)], found | set(rules))

    def subset(self, ends: np.ndarray, target: int) -> list[int]:
        """`subset_with_sum`, while there is effort left for it."""
        if self.steps <= 0:
            return []
        self.steps -= len(ends) // 16 + (20_000 if 12 < len(ends) <= 25 else 500)
        return subset_with_sum(ends, target)

    def open(self, side: int, op: str | None = None) -> list[Atom]:
        """The atoms that have executions left, of one op or of any."""
        return [atom for atom in (self.sides[side] if op is None else self.by_op[side].get(op, ())) if atom.left]


@dataclass(frozen=True)
class Rewrite:
    """One op of the left program for which another of the right stands. anywhere: also in another phase. by_sum: the
    right one is a sum, which in a backward pass may be of gradients, so that there it stands for no parameters."""

    rule: str
    left: str
    right: str
    anywhere: bool = True
    by_sum: bool = False


def match(left: Sequence[Record], right: Sequence[Record], axes: Mapping[str, str] | None = None) -> Match:
    """Atoms of both sides with their direct counterparts; what has none is left open for other rules."""
    return Match((atoms(left, 0, axes), atoms(right, 1, axes)))


def identical(found: Match) -> None:
    """What is equal in every fact that is known, its source and its parameter included."""

    def key(atom: Atom) -> tuple[Any, ...]:
        r = atom.record
        return atom.op, atom.dtype, atom.size, r.phase, atom.signature(), r.source, r.detail, r.executions

    _bucketwise(found, key, key, lambda a, b: True)


def one_to_one(found: Match, sense: Sense, rewrite: Rewrite | None = None, exact_edges: bool = False) -> None:
    """Pairs of atoms of the same amount; the more alike, the earlier."""

    def allowed(a: Atom, b: Atom) -> bool:
        if exact_edges and set(a.record.edges or ()) != set(b.record.edges or ()):
            return False
        return same_work(a, b) and same_ranks(a, b)

    def key(atom: Atom) -> tuple[Any, ...]:
        return _op(atom, rewrite), sense.amount(atom), sense.kind(atom)

    _bucketwise(found, key, Atom.signature, allowed, [rewrite.rule] if rewrite else [])


def other_ranks(found: Match, sense: Sense) -> None:
    """Pairs that would be counterparts if the same ranks took part: as many do, but others."""

    def allowed(a: Atom, b: Atom) -> bool:
        return same_work(a, b) and a.record.group_size == b.record.group_size

    def key(atom: Atom) -> tuple[Any, ...]:
        return atom.op, sense.amount(atom), sense.kind(atom)

    _bucketwise(found, key, Atom.signature, allowed, ["other_ranks"])


def _op(atom: Atom, rewrite: Rewrite | None) -> str | None:
    """The op, or for a rewrite one name for both, and None for what it does not concern."""
    if rewrite is None:
        return atom.op
    if rewrite.by_sum and atom.moves == "parameter" and atom.record.phase == "backward":
        return None
    return rewrite.rule if atom.op == (rewrite.left, rewrite.right)[atom.side] else None


def _bucketwise(
    found: Match,
    key: Callable[[Atom], tuple[Any, ...]],
    signature: Callable[[Atom], tuple[Any, ...]],
    allowed: Callable[[Atom, Atom], bool],
    rules: Sequence[str] = (),
) -> None:
    """Pair the open atoms of equal keys, first those of the likest signatures, in the order of the programs.

    The atoms of one signature are alike in all that `allowed` looks at, so it is asked once for two signatures.
    """
    buckets: dict[tuple[Any, ...], tuple[dict[Any, deque[Atom]], dict[Any, deque[Atom]]]] = {}
    for side in (0, 1):
        for atom in found.open(side):
            if (kind := key(atom))[0] is not None and (side == 0 or kind in buckets):
                bucket = buckets.setdefault(kind, ({}, {}))
                bucket[side].setdefault(signature(atom), deque()).append(atom)
    for left, right in buckets.values():
        pairs = [(mine, theirs) for mine in left.values() for theirs in right.values() if allowed(mine[0], theirs[0])]
        for mine, theirs in sorted(pairs, key=lambda pair: -likeness(pair[0][0], pair[1][0])):
            while mine and theirs:
                found.pair([mine[0]], [theirs[0]], rules, most=evenly(mine, theirs))
                for queue in (mine, theirs):
                    if not queue[0].left:
                        queue.popleft()
                    else:
                        queue.rotate(-1)  # what runs in a loop is the counterpart of some of each tick's calls


def evenly(mine: Sequence[Atom], theirs: Sequence[Atom]) -> int:
    """How often the first of two queues are counterparts, such that all of a queue have as many as the others."""
    counts = [-(-queue[0].left // len(other)) for queue, other in ((mine, theirs), (theirs, mine))]
    return max(1, *counts) if min(mine[0].left, theirs[0].left) > 1 else 1


def sums(found: Match, sense: Sense, rewrite: Rewrite | None = None) -> None:
    """Several atoms of one side whose amounts add up to one of the other."""
    rules = [rewrite.rule] if rewrite else []
    for side in (1, 0):  # the side of the one
        groups: dict[tuple[Any, ...], dict[Any, list[Atom]]] = defaultdict(lambda: defaultdict(list))
        for atom in found.open(1 - side):
            groups[_op(atom, rewrite), sense.kind(atom)][atom.signature()].append(atom)
        hopeless: set[tuple[Any, ...]] = set()
        cache: dict[tuple[Any, ...], tuple[list[Atom], np.ndarray]] = {}
        ones = deque(found.open(side))
        while ones:
            one = ones.popleft()
            kind = _op(one, rewrite), sense.kind(one)
            asked = (*kind, one.signature(), sense.amount(one))
            if kind[0] is None or kind not in groups or asked in hopeless:
                continue
            if asked[:-1] not in cache:
                alike = groups[kind].values()
                same = (some for some in alike if same_work(some[0], one) and same_ranks(some[0], one))
                fit = (some for some in same if _may_move(some[0], one, sense))
                if not sense.same_phase and one.op == "all_gather":  # what moved to another phase is known to be that
                    fit = (some for some in fit if some[0].moves == one.moves)
                several = sorted((m for some in fit for m in some if m.left), key=lambda m: (m.index, m.part))
                cache[asked[:-1]] = several, cumulative(map(sense.amount, several))
            several, ends = cache[asked[:-1]]
            chosen = [several[i] for i in found.subset(ends, sense.amount(one))]
            if len(chosen) < 2 or not splits(one, chosen):
                hopeless.add(asked)
                continue
            found.pair(*([one], chosen) if side == 0 else (chosen, [one]), rules)
            cache.clear()
            if one.left:
                ones.append(one)  # after the others have had their turn


def _may_move(a: Atom, b: Atom, sense: Sense) -> bool:
    """Whether one may be among the others. In another phase an activation is not part of what may be a gradient."""
    return sense.same_phase or a.moves == b.moves or "activation" not in (a.moves, b.moves)


def splits(one: Atom, several: Sequence[Atom]) -> bool:
    """Whether one array can be made of these: a flat one of any, one with a shape only of its slices along a dim."""
    if one.shape is None or len(one.shape) < 2 or any(m.shape is None or len(m.shape) < 2 for m in several):
        return True
    shapes = [m.shape or () for m in several]
    if any(len(shape) != len(one.shape) for shape in shapes):
        return True  # reshaped on the way
    return any(
        all(shape[:dim] + shape[dim + 1 :] == one.shape[:dim] + one.shape[dim + 1 :] for shape in shapes)
        for dim in range(len(one.shape))
    )


def cumulative(numbers: Iterable[int]) -> np.ndarray:
    """0 and the cumulative sums; beyond 64 bits, of Python's own integers."""
    ends = list(accumulate(numbers, initial=0))
    return np.array(ends, dtype=np.int64 if ends[-1] < 2**62 else object)


def subset_with_sum(ends: np.ndarray, target: int, most: int = 24) -> list[int]:
    """Indices of some numbers that add up to `target`, or none. ends: 0 and their cumulative sums.

    Looks for a run of neighbours, the whole among them; of up to `most` numbers, for any subset.
    """
    if not 0 < target <= ends[-1]:
        return []
    at = np.minimum(np.searchsorted(ends, ends + target), len(ends) - 1)
    hits = np.flatnonzero(ends[at] == ends + target)
    if len(hits):
        return [i for i in range(hits[0], at[hits[0]]) if ends[i + 1] > ends[i]]
    numbers = np.diff(ends).tolist()
    if len(numbers) > most:
        return []
    reached: dict[int, tuple[int, ...]] = {0: ()}
    for i, number in enumerate(numbers):
        for total, chosen in list(reached.items()):
            if total + number <= target and len(reached) < 10_000:
                reached.setdefault(total + number, (*chosen, i))
    return list(reached.get(target, ()))


def regrouped(found: Match, sense: Sense, rewrite: Rewrite | None = None) -> None:
    """All that is open of one kind on one side, which adds up to all that is open of it on the other."""
    groups: dict[tuple[Any, ...], tuple[list[Atom], list[Atom]]] = defaultdict(lambda: ([], []))
    for side in (0, 1):
        for atom in found.open(side):
            if (op := _op(atom, rewrite)) is not None:
                groups[op, sense.kind(atom), atom.record.group_size, atom.ranks][side].append(atom)
    for left, right in groups.values():
        amounts = [sum(atom.left * sense.amount(atom) for atom in side) for side in (left, right)]
        if not left or not right or amounts[0] != amounts[1] or len(left) + len(right) < 3:
            continue
        if 1 in (len(left), len(right)) and not splits(*((left[0], right) if len(left) == 1 else (right[0], left))):
            continue
        likes = [{atom.signature(): atom for atom in side}.values() for side in (left, right)]
        alike = (same_work(a, b) and same_ranks(a, b) and _may_move(a, b, sense) for a in likes[0] for b in likes[1])
        if all(alike):
            rules = {rule for a in left for b in right for rule in overlooked(a, b)} | {"regrouped"}
            taken = [(atom, atom.left) for atom in (*left, *right)]
            found.link(taken, rules | ({rewrite.rule} if rewrite else set()))
