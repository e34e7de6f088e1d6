"""What `shardiff diff A.json B.json` does: the diff of two programs that are in files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shardiff import mesh
from shardiff.diff import Diff, diff
from shardiff.diff.files import read_program


def diff_files(left: Path, right: Path, meshes: tuple[str | None, str | None] = (None, None)) -> Diff:
    """The diff of two files. meshes: of either side, as text; where both are given, axes of equal names are the same.

    Raises ValueError, one line, for what is no such file or mesh.
    """
    parsed = [mesh.parse(text) if text else None for text in meshes]
    sides = [read_program(path, of) for path, of in zip((left, right), parsed, strict=True)]
    return diff(*sides, axes=all(parsed))


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
