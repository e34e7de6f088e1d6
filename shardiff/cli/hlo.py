"""What `shardiff hlo` does: the communication in files of HLO text."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from shardiff import hlo
from shardiff.diff.record_view import summary, table
from shardiff.record import SCHEMA, totals
from shardiff.system import inputs


def show(files: Sequence[str], as_json: bool) -> int:
    """Read each file ("-" is stdin) and print its table, or a line of JSON. Returns 2 if one could not be read, else 0.

    What cannot be read is told in one line on stderr; the others are read nevertheless.
    """
    status = 0
    for file in files:
        try:
            module = hlo.read_bytes(inputs.read_bytes(file), "<stdin>" if file == "-" else file, inputs.most_bytes())
        except (hlo.HloError, inputs.Unreadable) as error:
            print("shardiff:", inputs.one_line(error), file=sys.stderr)
            status = 2
            continue
        if as_json:
            print(json.dumps(to_json(file, module)), flush=True)
        else:
            _print(file, module)
    return status


def to_json(file: str, module: hlo.Module) -> dict[str, object]:
    """Plain JSON types."""
    return {
        "schema": SCHEMA,
        "file": file,
        "module": module.name,
        "num_devices": module.num_devices,
        "records": [record.to_json() for record in module.records],
        "totals": totals(module.records),
    }


def _print(file: str, module: hlo.Module) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 130)
    console.print(f"{file}: module {module.name}, {module.num_devices} devices", markup=False)
    if module.records:
        console.print(table(module.records))
    console.print(summary(module.records), markup=False)
