"""Injects faults into commands as a user runs them (`injections`), and prints a table of how each ended.

make faults        python -m shared_tests.tool.faults --count 50 --seed 0 --output FILE.json
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardiff.system import files, machine
from shared_tests.tool.injections import LIMIT, TIMEOUT, Outcome, inject, injections


def main() -> int:
    """Inject, print a table, and return 1 if something was not survived."""
    parser = argparse.ArgumentParser(
        prog="python -m shared_tests.tool.faults", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=50, help="injections")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2, help="commands that run at the same time")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", type=Path, help="write the JSON here")
    options = parser.parse_args()
    facts = machine.facts()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background, and commands inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with ThreadPoolExecutor(options.at_once) as threads:
        outcomes = list(threads.map(inject, injections(options.count, options.seed)))
    document = {
        "kind": "faults",
        "schema": 1,
        "machine": facts,
        "settings": {"seed": options.seed, "timeout": TIMEOUT, "limit": LIMIT, "at_once": options.at_once},
        "rows": [row(outcome) for outcome in outcomes],
        "survived": sum(not outcome.wrong for outcome in outcomes),
    }
    if options.output:
        files.write(options.output, document)
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        show(outcomes, machine.summary(facts))
    return int(any(outcome.wrong for outcome in outcomes))


def row(outcome: Outcome) -> dict[str, Any]:
    """An outcome in plain JSON types, with the first line of what was said."""
    said = next((line for line in outcome.said.splitlines() if line.strip()), "")
    seconds = None if outcome.seconds is None else round(outcome.seconds, 2)
    fields = {"status": outcome.status, "seconds": seconds, "said": said, "left": outcome.left, "wrong": outcome.wrong}
    return {**asdict(outcome.injection), **fields}


def show(outcomes: Sequence[Outcome], summary: str) -> None:
    """Print a line for each injection."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("command", "framework", "strategy", "fault"):
        table.add_column(name)
    for name in ("survived", "status", "seconds", "left over"):
        table.add_column(name, justify="right")
    for one in outcomes:
        i = one.injection
        seconds = "-" if one.seconds is None else f"{one.seconds:.1f}"
        verdict = "[red]NO[/]" if one.wrong else "[green]yes[/]"
        left = ", ".join(one.left) or "nothing"
        table.add_row(i.command, i.framework, i.strategy, str(i), verdict, str(one.status), seconds, left)
    console = Console(
        highlight=False,
        soft_wrap=True,
        width=None if sys.stdout.isatty() else 160,
    )
    console.print(table)
    for one in outcomes:
        if one.wrong:
            console.print(f"{one.injection.command}, {one.injection}: {'; '.join(one.wrong)}", markup=False)
    console.print(summary, markup=False)
    console.print(f"{sum(not one.wrong for one in outcomes)} of {len(outcomes)}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
