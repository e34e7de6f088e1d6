"""What docs/benchmarks.md says of pipeline schedules, made from the results: `python -m benchmarks.report.schedules`.

It stands between two comments. With the word `commands` behind it, it prints what measures it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.bubbles import picture
from benchmarks.documents import kept
from benchmarks.documents.bubbles import Bubbles, Row
from benchmarks.documents.results_io import parse, read_file
from benchmarks.documents.steps import Steps
from benchmarks.report.blocks import Cell, Table
from benchmarks.report.markdown import filled, markdown
from benchmarks.report.transformer import origin, share, wrapped
from benchmarks.words import counted
from shardiff.system.files import write
from shardiff.system.words import size

PAGE, PICTURE = (kept.ROOT / "docs" / name for name in ("benchmarks.md", "bubbles.png"))
BEGIN, END = "<!-- made by benchmarks.report.schedules -->", "<!-- until here -->"
PEERS = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")  # schedules that torch.distributed.pipelining has too
COMMANDS = {  # what measures each result, and the results' names
    "schedules_real": "bench bubbles --stages 2 --microbatches 4 --layers 64 --batch 2048 --implementation torch "
    "--iterations 3",
    "schedules_paced": "bench bubbles --stages 4 --microbatches 8 --implementation torch --iterations 2",
    **{
        f"schedule_{name}": f"bench steps --strategy pipeline_parallel --schedule {name} --layers 8 "
        "--implementation torch --implementation peer --iterations 30 --rounds 2"
        for name in PEERS
    },
}
REAL = """Every schedule in torch, with a core for each stage. Beside the measured bubble stands the closed form
([schedules.md](schedules.md)), for which all passes take the same time, and the bubble of the schedule replayed with
the measured times of its passes and communication that takes none. Kept is what autograd and the gradients that are put
off hold at most, on the stage that keeps most. Sending takes a core's time here, and adding up gradients makes W longer
than B, so each stage has many layers and samples: the bubble of a shorter step is further from its closed form."""
PACED = """The same with more stages than cores: each stage runs on a paced device
([torch_impl/paced.py](../torch_impl/paced.py)), whose products take the time of a stated rate while the CPU computes
their values. A forward pass of a microbatch through a stage takes {seconds:g} s there. A sample in which the CPU fell
behind is repeated; {repeated}."""
BESIDE = """The same schedules beside torch.distributed.pipelining's own, in turn, without pacing: the time of ours
over theirs, medians with quartiles."""


def part(real: Bubbles, paced: Bubbles, beside: dict[str, Steps]) -> str:
    """The text between the comments. beside: schedule -> steps of both; none where they have not been measured."""
    repeated = sum(row.repeated for row in paced.rows)
    said = f"{counted(repeated, 'sample')} {'was' if repeated == 1 else 'were'}" if repeated else "none was"
    found = [*measured(REAL, real), *measured(PACED.format(seconds=paced.settings.paced_seconds, repeated=said), paced)]
    if beside:
        first = next(iter(beside.values()))
        found += [wrapped(BESIDE), markdown(peers(beside)), origin(first)]
    return "\n\n".join(found)


def measured(told: str, bubbles: Bubbles) -> list[str]:
    """What was measured, its table, where it comes from, and what is within 10 % of the closed form."""
    settings = f"{bubbles.settings}, medians of {bubbles.settings.iterations} steps"
    return [wrapped(told), markdown(table(bubbles.rows)), origin(bubbles, settings), wrapped(within(bubbles.rows))]


def table(rows: Sequence[Row]) -> Table:
    """A line for each run."""
    heads = ["stages", "microbatches", "measured", "closed form", "replayed", "kept"]
    cells = []
    for row in rows:
        bubbles = row.measured.median, row.theory, row.weighted.median if row.weighted else None
        shown = ["-" if bubble is None else f"{bubble:.3f}" for bubble in bubbles]
        line = [row.order, str(row.stages), str(row.microbatches), *shown, size(max(row.kept)) if row.kept else "-"]
        cells.append([Cell(text) for text in line])
    return Table(["schedule", *heads], [False, *[True] * len(heads)], cells)


def within(rows: Sequence[Row]) -> str:
    """How far the measured bubbles are from the closed forms, and what is kept from its own."""
    far = [row for row in rows if abs(row.of_theory - 1) > 0.1]
    text = f"{len(rows) - len(far)} of {len(rows)} bubbles are within 10 % of the closed form"
    if far:
        named = (f"{row.order} ({row.of_theory:.2f} of {row.theory:.3f})" for row in far)
        text += f"; the {'other is' if len(far) == 1 else 'others are'} {', '.join(named)}"
    kept = [max(row.kept) / max(row.kept_theory) for row in rows if row.kept and row.kept_theory]
    spread = dict.fromkeys(f"{share:.2f}" for share in (min(kept), max(kept))) if kept else ()
    return f"{text}. What is kept is {' to '.join(spread)} of its closed form." if kept else f"{text}."


def peers(beside: dict[str, Steps]) -> Table:
    """A line for each schedule, a column for each number of stages."""
    stages = sorted({row.ranks for result in beside.values() for row in result.rows})
    cells = []
    for name, result in beside.items():
        over = {r.ranks: r for r in result.ratios if r.of == "torch" and r.to == "pipelining"}
        cells.append([Cell(name), *(Cell(share(over.get(n))) for n in stages)])
    return Table(["schedule", *(f"{n} stages" for n in stages)], [False, *[True] * len(stages)], cells)


def result(name: str) -> Any:
    """The newest result of this name; None if there is none."""
    file = kept.newest(name)
    return None if file is None else parse(*next(iter(read_file(file).items())))


def replaced(page: str) -> str:
    """The page with the part made anew."""
    beside = {name: found for name in PEERS if (found := result(f"schedule_{name}"))}
    return filled(page, BEGIN, END, part(result("schedules_real"), result("schedules_paced"), beside))


def lines() -> list[str]:
    """The commands that measure everything, and then make the part."""
    measuring = [f".venv/bin/shardiff {line} --output {kept.of_today(name)}" for name, line in COMMANDS.items()]
    return [*measuring, ".venv/bin/python -m benchmarks.report.schedules"]


def main() -> None:
    """Write the part, and draw the picture of the newest timelines of stages that have a core each."""
    write(PAGE, replaced(PAGE.read_text(encoding="utf-8")))
    picture.picture(result("bubbles"), PICTURE)


if __name__ == "__main__":
    print("\n".join(lines())) if sys.argv[1:] == ["commands"] else main()
