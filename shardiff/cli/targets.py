"""What `shardiff targets` does: the hardware that there is a compiler for."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from shardiff.compiling.hardware import known, missing_compiler
from shardiff.system.words import size


def show(as_json: bool) -> None:
    """Print all families of targets."""
    rows = known()
    if as_json:
        flat = [{"name": r.name, "compiler": r.compiler, "attached": r.attached, **asdict(r.family)} for r in rows]
        print(json.dumps({"schema": 2, "targets": flat}, indent=2))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("name", "such as", "compiler", "here", "memory of a chip", "links"):
        table.add_column(name, overflow="fold")
    for row in rows:
        family = row.family
        installed = "installed" if row.compiler else escape(missing_compiler(family.kind))
        here = {None: "", 0: "none"}.get(row.attached, str(row.attached))
        memory = size(family.memory) if family.memory else ""
        table.add_row(row.name, ", ".join(family.examples), installed, here, memory, family.link)
    Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 130).print(table)
