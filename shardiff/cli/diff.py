"""What `shardiff diff LEFT RIGHT` does: two programs, from wherever they come, side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence

from shardiff.cli import sides
from shardiff.cli.answers import complain, one_of
from shardiff.diff import FAIL_ON, Diff, diff, shared_axes
from shardiff.program import Program

Pair = tuple[str | None, str | None]


def plan(
    what: Sequence[str],
    targets: Pair,
    meshes: Pair,
    nproc: int | None,
    step: int | None,
    fail_on: str | None,
    made: Mapping[str, Callable[[], Program]] | None = None,
) -> tuple[sides.Side, sides.Side]:
    """The options as two sides. made: what makes the programs of arguments that only the caller knows.

    Raises ValueError, one line, for what cannot work.
    """
    if fail_on is not None:
        one_of("fail-on", fail_on, FAIL_ON)
    return sides.plan(what, targets, meshes, nproc, step, made)


def run(pair: tuple[sides.Side, sides.Side], same_axes: bool, fail_on: str | None, as_json: bool) -> int:
    """Get both programs, print their diff, and return the exit status. Raises ValueError, one line.

    same_axes: axes of equal names and lengths are the same, however either side numbers its ranks.
    """
    try:
        left, right = map(sides.program, pair)
    except sides.SideError as error:
        complain(str(error))
        return error.status
    axes = shared_axes(left.mesh, right.mesh) if same_axes and left.mesh and right.mesh else None
    found = diff(left, right, axes=axes)
    show(found, as_json)
    return int(found.fails(fail_on))


def show(found: Diff, as_json: bool) -> None:
    """Print a diff, as one line of JSON or as a table."""
    if as_json:
        print(json.dumps(found.to_json()))
        return
    from rich.console import Console

    from shardiff.diff.view import parts

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)
    for part in parts(found.left, found.right, found.rows):
        console.print(part)
