"""Makes records for tests of the diff from a few arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardiff.diff.rows import Row, align
from shardiff.record import Executions, Part, Record, record


def rec(op: str, size: int, phase: str = "backward", n: int = 4, dtype: str = "float32", **fields: Any) -> Record:
    """A record; parts: sizes, of the same type."""
    fields["parts"] = tuple(Part(dtype, part) for part in fields.get("parts", ()))
    return record(op, dtype, size, None if op == "collective_permute" else n, phase=phase, **fields)


def looped(one: Record, times: int) -> Record:
    """One instruction in a loop of a compiled program."""
    return replace(one, executions=Executions(times, times), computation="body")


def permute(size: int, edges: list[tuple[int, int]], phase: str = "forward", times: int = 1) -> Record:
    one = rec("collective_permute", size, phase, edges=tuple(edges))
    return looped(one, times) if times > 1 else one


def only_row(left: list[Record], right: list[Record]) -> Row:
    rows = align(left, right)
    assert len(rows) == 1, rows
    return rows[0]


OTHER, THIS = ((0, 2), (1, 3)), ((0, 1), (2, 3))


PP = [(0, 1), (1, 2), (2, 3)]
FOURS = ((0, 1, 2, 3), (4, 5, 6, 7))
DP, TP, BOTH = ((0, 2), (1, 3)), ((0, 1), (2, 3)), ((0, 1, 2, 3),)


def derived(one: Record, name: str = "jvp()/dot_general") -> Record:
    """A record that a compiler derived from an operation of this name."""
    return replace(one, computation="main", detail=name)


def over(op: str, size: int, groups: tuple[tuple[int, ...], ...], phase: str = "backward") -> Record:
    return rec(op, size, phase, n=len(groups[0]), groups=groups)
