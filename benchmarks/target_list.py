"""What `shardiff targets` does: the hardware that there is a compiler for."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from benchmarks.record_view import size
from jax_impl.targets import known


def show(as_json: bool) -> None:
    """Print all families of targets."""
    rows = known()
    if as_json:
        print(json.dumps({"targets": [asdict(row) for row in rows]}, indent=2))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("name", "such as", "compiler", "here", "memory of a chip", "link"):
        table.add_column(name, overflow="fold")
    for row in rows:
        installed = "installed" if row.compiler else 'pip install "shardiff\\[compilers]"'
        here = "" if row.attached is None else str(row.attached)
        table.add_row(row.name, ", ".join(row.examples), installed, here, size(row.memory), row.link)
    Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 130).print(table)
