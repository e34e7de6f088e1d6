"""`make fuzz`: everything that reads HLO text or JSON is given mutated files.

Each input must give an answer or be refused in one line, within SECONDS and MEMORY. HLO goes through `shardiff hlo` and
then `shardiff diff A.json B.json`; JSON goes through `diff A B`, `report A B` and the reading of
`report --results`. An input is made from the campaign's seed and its own number, so that each can be made again alone:

    python -m shared_tests.tool.fuzz --seed 0 --again hlo:4711 > input
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shared_tests.tool.fuzz.documents import make
from shared_tests.tool.fuzz.shares import KINDS, MEMORY, Tally, campaign
from shared_tests.tool.fuzz.trial import SECONDS, one


def table(tally: Tally) -> Any:
    """A line for each mutation."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("input", "mutation", "inputs", "answered", "refused in a line", "failed"):
        made.add_column(name, justify="left" if name in ("input", "mutation") else "right")
    for kind in KINDS:
        counts = tally.outcomes[kind]
        names = sorted({mutation for mutation, _ in counts})
        for name in names:
            each = [counts[name, outcome] for outcome in ("answer", "refused", "failed")]
            made.add_row(kind if name == names[0] else "", name.replace("_", " "), *map(str, (sum(each), *each)))
    return made


def main(argv: list[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m shared_tests.tool.fuzz", description=about)
    parser.add_argument("--hlo", type=int, default=100_000, metavar="N")
    parser.add_argument("--json-files", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--again", metavar="KIND:NUMBER", help="print this input, and what becomes of it on stderr")
    options = parser.parse_args(argv)
    if options.again:
        kind, _, number = options.again.partition(":")
        sys.stdout.buffer.write(make(kind, options.seed, int(number))[1])
        with tempfile.TemporaryDirectory() as directory:
            print(*one(kind, options.seed, int(number), Path(directory)), file=sys.stderr)
        return 0

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    counts = {"hlo": options.hlo, "json": options.json_files}
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        tasks = {kind: progress.add_task(kind, total=counts[kind]) for kind in KINDS}

        def show(tally: Tally) -> None:
            for kind in KINDS:
                progress.update(tasks[kind], completed=tally.count(kind))

        tally = campaign(counts, options.seed, options.processes, show)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table(tally))
    for kind, number, why in tally.failures:
        console.print(f"{kind}:{number} {why}", markup=False)
    document = to_json(tally, counts, options.seed, options.processes, time.monotonic() - began)
    for line in document["sentences"]:
        console.print(line, markup=False)
    if options.output:
        from shardiff.system.files import write

        write(options.output, document)
    return 1 if tally.failures else 0


def to_json(tally: Tally, counts: dict[str, int], seed: int, processes: int, seconds: float) -> dict[str, Any]:
    """The result as plain JSON types."""
    from shardiff.system import machine

    rows = []
    sentences = []
    for kind in KINDS:
        sums = {outcome: 0 for outcome in ("answer", "refused", "failed")}
        for mutation in sorted({mutation for mutation, _ in tally.outcomes[kind]}):
            each = {outcome: tally.outcomes[kind][mutation, outcome] for outcome in sums}
            rows.append({"input": kind, "mutation": mutation, **each})
            sums = {outcome: sums[outcome] + each[outcome] for outcome in sums}
        failed = len([one for one in tally.failures if one[0] == kind])
        slowest, number = tally.slowest[kind]
        sentences.append(
            f"{counts[kind]:,} mutated {kind} files: {sums['answer']:,} answered, {sums['refused']:,} refused in one "
            f"line, {failed} failed; the slowest, number {number}, took {slowest:.2f} s of a core."
        )
    sentences.append(
        f"At most {tally.peak_bytes / 1e6:.0f} MB of memory in a process; {seconds:.0f} s in {processes} processes."
    )
    return {
        "kind": "fuzz",
        "schema": 1,
        "machine": machine.facts(),
        "settings": {**counts, "seed": seed, "processes": processes, "seconds_limit": SECONDS, "memory_limit": MEMORY},
        "sentences": sentences,
        "rows": rows,
        "slowest": {kind: {"seconds": s, "number": number} for kind, (s, number) in tally.slowest.items()},
        "peak_bytes": tally.peak_bytes,
        "seconds": seconds,
        "failures": [{"input": kind, "number": number, "what": why} for kind, number, why in tally.failures],
    }


if __name__ == "__main__":
    sys.exit(main())
