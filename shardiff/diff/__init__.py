"""The diff of two programs' communication: `diff(left, right)`, and what one asks of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardiff.diff.rows import Row, align, extra_bytes, unexplained
from shardiff.diff.rules import WHY, labels
from shardiff.mesh import Mesh
from shardiff.program import Program
from shardiff.record import SCHEMA

__all__ = ["Diff", "Row", "diff"]

FAIL_ON = ("unexplained", "extra-bytes")


@dataclass(frozen=True)
class Diff:
    """Two programs side by side. rows: which of their records are counterparts, and under which rules."""

    left: Program
    right: Program
    rows: tuple[Row, ...]

    @property
    def unexplained(self) -> int:
        """How many rows no rule explains."""
        return unexplained(self.rows)

    @property
    def extra_bytes(self) -> int:
        """Wire bytes of a rank in one step that the right program sends beyond those of the left; negative if fewer."""
        return extra_bytes(self.rows)

    def fails(self, on: str | None) -> bool:
        """Whether the diff has what must not be: "unexplained" rows, or "extra-bytes"; None: nothing is forbidden."""
        if on is not None and on not in FAIL_ON:
            raise ValueError(f"unknown fail-on {on!r}; known: {', '.join(FAIL_ON)}")
        return self.unexplained > 0 if on == "unexplained" else on == "extra-bytes" and self.extra_bytes > 0

    def assert_same(self, allow: Iterable[str] = ()) -> None:
        """Raise AssertionError, whose text is the table, unless every row is the same or under the rules allowed.

        allow: names of rules, as in `shardiff.diff.rules.WHY`.
        """
        __tracebackhide__ = True  # pytest shows the line that asked
        allowed = set(allow)
        if unknown := sorted(allowed - WHY.keys()):
            raise ValueError(f"unknown rule {unknown[0]!r}; known: {', '.join(WHY)}")
        if not all(row.verdict == "same" or (row.rules and allowed.issuperset(row.rules)) for row in self.rows):
            raise AssertionError(f"the programs differ\n{self}")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `Diff.from_json` is its inverse."""
        return {
            "schema": SCHEMA,
            "left": self.left.to_json(),
            "right": self.right.to_json(),
            "rows": [row.to_json() for row in self.rows],
            "unexplained": self.unexplained,
            "extra_bytes": self.extra_bytes,
        }

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Diff:
        """Inverse of `to_json`. Raises ValueError, one line, for a record that is none."""
        left, right = (Program.from_json(fields[side]) for side in ("left", "right"))
        return Diff(left, right, tuple(map(Row.from_json, fields["rows"])))

    def __repr__(self) -> str:
        from shardiff.diff.view import as_text

        return as_text(self.left, self.right, self.rows)

    def _repr_html_(self) -> str:
        from shardiff.diff.view import as_html

        return as_html(self.left, self.right, self.rows)


def diff(left: Program, right: Program, axes: Mapping[str, str] | bool | None = None) -> Diff:
    """Which records of two programs are counterparts, and under which rules the rest is explained.

    axes: by default a collective is the same only if the very same ranks take part. Where the programs number their
    ranks in different ways, say which axis of the left mesh is which of the right: {"dp": "data"}, or True for axes of
    equal names and lengths. Both programs then need a mesh, and the named axes must be equally long. Raises ValueError
    otherwise, and for what is no Program.
    """
    for side in (left, right):
        if not isinstance(side, Program):
            made = "shardiff.read, compile and trace make one"
            raise ValueError(f"diff compares two Programs, got {type(side).__name__}; {made}")
    names = labels(left.label, right.label)
    return Diff(left, right, tuple(align(left.records, right.records, mapped(left, right, axes), names)))


def shared_axes(left: Mesh, right: Mesh) -> dict[str, str]:
    """The axes that have equal names and lengths in two meshes."""
    return {name: name for name in left.names if name in right.names and left.size_of(name) == right.size_of(name)}


def mapped(left: Program, right: Program, axes: Mapping[str, str] | bool | None) -> dict[str, str] | None:
    """Which axis of the left mesh is which of the right, checked."""
    if not axes:
        return None
    if left.mesh is None or right.mesh is None:
        raise ValueError("axes map one mesh to another: both programs need a mesh, such as dp=2,tp=4")
    if axes is True:
        axes = shared_axes(left.mesh, right.mesh)
        if not axes:
            raise ValueError(f"the meshes {left.mesh} and {right.mesh} have no axis in common")
    for mine, theirs in axes.items():
        for name, mesh in ((mine, left.mesh), (theirs, right.mesh)):
            if name not in mesh.names:
                raise ValueError(f"no axis {name} in the mesh {mesh}")
        if left.mesh.size_of(mine) != right.mesh.size_of(theirs):
            sizes = f"{left.mesh.size_of(mine)} and {right.mesh.size_of(theirs)}"
            raise ValueError(f"axis {mine} cannot be axis {theirs}: they have {sizes} ranks")
    return dict(axes)
