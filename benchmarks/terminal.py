"""What the commands of the lesson share when they print: tables and lines, JSON, and progress on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

Progress = Callable[..., None]  # progress(description=..., completed=...), either of them


def console(width: int = 120) -> Console:
    """Standard output: as wide as a terminal, or of so many columns where it is a file."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else width)


def show(parts: Iterable[RenderableType], width: int = 120) -> None:
    """Print tables, and lines as they stand: what looks like markup in a line is text."""
    out = console(width)
    for part in parts:
        out.print(part, markup=False) if isinstance(part, str) else out.print(part)


def show_json(document: Any) -> None:
    """Print a document of plain JSON types."""
    print(json.dumps(document, indent=1, allow_nan=False))


def table(words: Sequence[str], numbers: Sequence[str], title: str = "", gap: int = 1) -> Table:
    """An empty table whose first columns hold words and whose last ones hold numbers, with spaces between them."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, gap, 0, 0), title=title or None, title_justify="left")
    for name in words:
        made.add_column(name, no_wrap=True)
    for name in numbers:
        made.add_column(name, justify="right", no_wrap=True)
    return made


@contextmanager
def progress(total: int | None = None, silent: bool = False) -> Iterator[Progress]:
    """A line on a terminal's standard error while something runs; without a total, only what runs and for how long."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    what = TextColumn("{task.description}")
    columns = (SpinnerColumn(), what) if total is None else (what, BarColumn(), MofNCompleteColumn())
    hidden = silent or not sys.stderr.isatty()
    with Bar(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, disable=hidden) as shown:
        task = shown.add_task("", total=total)
        yield lambda **changes: shown.update(task, **changes)
