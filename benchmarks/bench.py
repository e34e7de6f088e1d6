"""What the three benchmarks share: they measure block by block, and their file is whole after every block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks import terminal
from benchmarks.documents.resume import earlier
from shardiff.system.files import Document, keeper

Save = Callable[[Document], object]
Starting = Callable[[str], object]


def kept(started: Document, output: Path | None, resume: bool) -> Document | None:
    """The document of the run to resume, or None. Raises ValueError, one line, for what cannot be resumed."""
    if not resume:
        return None
    if output is None:
        raise ValueError("--resume needs --output FILE.json, the file of the interrupted run")
    return earlier(output, started)


def measured(
    measure: Callable[[Save, Starting], Document], output: Path | None, blocks: int | None
) -> tuple[Document, bool]:
    """What `measure` gives, and whether it could be written to `output`. Shows progress on a terminal's stderr.

    measure: called with what saves the document so far, and what is told the name of the next block. blocks: how many
    there are, if they are to be counted.
    """
    keep, placed = keeper(output), True
    with terminal.progress(blocks) as update:

        def save(document: Document) -> None:
            nonlocal placed
            placed = keep(document)
            update(completed=sum(len(run["blocks"]) for run in document["runs"]))

        document = measure(save, lambda name: update(description=name))
    return document, placed
