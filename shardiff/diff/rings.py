"""Permutes around a ring: for which one collective stands, or along which data go that others keep."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import Any

from shardiff.diff.alignment import Match
from shardiff.diff.atoms import Atom, Sense, kind_of, overlooked

Edges = tuple[tuple[int, int], ...]


def rings(found: Match, sense: Sense, side: int) -> None:
    """An all_gather or reduce_scatter of `side` over n ranks, for which n - 1 permutes of an n-th stand."""
    for one in [*found.open(side, "all_gather"), *found.open(side, "reduce_scatter")]:
        size = one.record.group_size or 0
        amount, rest = divmod(sense.amount(one), size) if size > 2 else (0, 1)
        if rest or not amount:
            continue
        while one.left:
            taken: list[tuple[Atom, int]] = []
            missing = size - 1
            for atom in found.open(1 - side, "collective_permute"):
                if (
                    missing
                    and sense.amount(atom) == amount
                    and sense.kind(atom) == sense.kind(one)
                    and within(atom, one)
                ):
                    taken.append((atom, min(atom.left, missing)))
                    missing -= taken[-1][1]
            if missing:
                break
            rules = {rule for atom, _ in taken for rule in overlooked(one, atom)} | {"ring"}
            found.link([(one, 1), *taken], rules)


def within(permute: Atom, one: Atom) -> bool:
    """Whether all edges of a permute lie inside the groups of another collective, as far as both are known."""
    edges, groups = permute.record.edges, one.record.groups
    if not edges or not groups:
        return True
    return all(any(source in group and target in group for group in groups) for source, target in edges)


def one_peer(found: Match, sense: Sense, side: int) -> None:
    """An all_to_all of `side` between two ranks, for which a permute of one half of it stands."""
    for one in found.open(side, "all_to_all"):
        if one.record.group_size != 2:
            continue
        while one.left:
            there = next(
                (
                    atom
                    for atom in found.open(1 - side, "collective_permute")
                    if sense.amount(atom) * 2 == sense.amount(one) and sense.kind(atom) == sense.kind(one)
                    if within(atom, one)
                ),
                None,
            )
            if there is None:
                break
            found.pair(*(([one], [there]) if side == 0 else ([there], [one])), ["one_peer"])


def around_again(found: Match, shape: tuple[int, int] | None) -> None:
    """What goes around rings of n ranks in the forward pass, and around again with its gradients in the backward pass.

    The data take n - 1 permutes, and their gradients n to come home with them. Who keeps the data sends the gradients
    back alone, in n - 1 permutes: as much as in the forward pass. shape: (ticks, microbatches) of a pipeline, which may
    do so in every tick, also in those of the bubble.
    """
    groups, onward = defaultdict[Any, list[Atom]](list), False  # whether anything goes from stage to stage
    for side in (0, 1):
        for atom in found.by_op[side].get("collective_permute", ()):
            if size := ring_size(atom.record.edges or ()):
                links = frozenset(frozenset(edge) for edge in atom.record.edges or ())
                groups[links, size, kind_of(atom.dtype)].append(atom)
            else:
                onward = True
    for (_, size, _), of_ring in groups.items():
        sums: dict[tuple[int, str], int] = defaultdict(int)
        for atom in of_ring:
            sums[atom.side, atom.record.phase] += atom.elements * atom.record.times
        once = [Fraction(sums[side, "forward"]) for side in (0, 1)]
        if not all(once) or once[1] / once[0] not in ratios(shape if onward else None):
            continue
        backward = [sums[side, "backward"] / once[side] for side in (0, 1)]  # in times around
        if sorted(backward) == [1, 1 + Fraction(size, size - 1)]:
            bubble = {"bubble_ticks"} if once[0] != once[1] else set[str]()
            rest = [atom for atom in of_ring if atom.left and (bubble or atom.record.phase == "backward")]
            types = {"dtype"} if len({atom.dtype for atom in rest}) > 1 else set[str]()
            rules = types | bubble | {"kept" if backward[0] > backward[1] else "sent_again", "homeward"}
            found.link([(atom, atom.left) for atom in rest], rules, extra=True)


def ratios(shape: tuple[int, int] | None) -> tuple[Fraction, ...]:
    """How often one program may run what the other runs once, with or without the ticks of a pipeline's bubble."""
    return (Fraction(1),) if shape is None else (Fraction(1), Fraction(*shape), 1 / Fraction(*shape))


def ring_size(edges: Edges) -> int:
    """The ranks of each ring, if the edges are rings of as many ranks each; 0 if not."""
    after = dict(edges)
    if len(after) < len(edges) or set(after) != set(after.values()):
        return 0
    sizes = set()
    for start in after:
        rank, size = after[start], 1
        while rank != start and size <= len(after):
            rank, size = after[rank], size + 1
        sizes.add(size)
    return sizes.pop() if len(sizes) == 1 and sizes != {1} else 0
