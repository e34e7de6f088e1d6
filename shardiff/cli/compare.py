"""What `shardiff diff LEFT RIGHT` does: two programs, from wherever they come, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from shardiff.cli import diff as shown
from shardiff.cli import sides
from shardiff.cli.answers import complain, one_of
from shardiff.diff import FAIL_ON, diff


def plan(
    what: Sequence[str],
    targets: tuple[str | None, str | None],
    meshes: tuple[str | None, str | None],
    nproc: int | None,
    fail_on: str | None,
) -> tuple[sides.Side, sides.Side]:
    """The options as two sides. Raises ValueError, one line, for what cannot work."""
    if fail_on is not None:
        one_of("fail-on", fail_on, FAIL_ON)
    return sides.plan(what, targets, meshes, nproc)


def show(left: sides.Side, right: sides.Side, same_axes: bool, fail_on: str | None, as_json: bool) -> int:
    """Get both programs, print their diff, and return the exit status. Raises ValueError, one line.

    same_axes: axes of equal names are the same, however either side numbers its ranks.
    """
    try:
        programs = sides.program(left), sides.program(right)
    except sides.SideError as error:
        complain(str(error))
        return error.status
    found = diff(*programs, axes=same_axes)
    shown.show(found, as_json)
    return int(found.fails(fail_on))
