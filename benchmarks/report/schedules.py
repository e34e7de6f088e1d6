"""What docs/benchmarks.md says of pipeline schedules, made from the results: `python -m benchmarks.report.schedules`.

It stands between two comments. With the word `commands` behind it, it prints what measures it.
"""

from __future__ import annotations

import sys
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
    "schedules_paced": "bench bubbles --batch 2048 --width 2048 --layers 16 --stages 2 --stages 4 --microbatches 8 "
    "--implementation torch --paced --paced-seconds 0.15 --iterations 2",
    **{
        f"schedule_{name}": f"bench steps --strategy pipeline_parallel --schedule {name} --layers 8 "
        "--implementation torch --implementation peer --iterations 20 --rounds 1"
        for name in PEERS
    },
}
INTRO = """Every schedule, in torch, with more stages than cores too: each stage runs on a paced device
([torch_impl/paced.py](../torch_impl/paced.py)), whose products take the time of a stated rate while the CPU computes
their values. A forward pass of a microbatch through a stage takes {seconds:g} s there. A sample in which the CPU fell
behind is repeated; {repeated}. Each cell is the measured bubble, and in brackets the closed form
([schedules.md](schedules.md)). Kept is what autograd and the gradients that are put off hold at most, on the stage that
keeps most, with {stages} stages and {m} microbatches."""
BESIDE = """The same schedules beside torch.distributed.pipelining's own, in turn, without pacing: the time of ours
over theirs, medians with quartiles."""


def part(bubbles: Bubbles, beside: dict[str, Steps]) -> str:
    """The text between the comments. beside: schedule -> steps of both; none where they have not been measured."""
    rows = [row for row in bubbles.rows if row.framework == "torch"]
    last = max(rows, key=lambda row: (row.stages, row.microbatches))
    repeated = sum(row.repeated for row in rows)
    seconds = bubbles.settings.paced_seconds
    told = INTRO.format(
        seconds=seconds,
        repeated=f"{counted(repeated, 'sample')} {'was' if repeated == 1 else 'were'}" if repeated else "none was",
        stages=last.stages,
        m=last.microbatches,
    )
    found = [wrapped(told), markdown(table(rows, last))]
    found += [origin(bubbles, f"{bubbles.settings}, medians of {bubbles.settings.iterations} steps")]
    found += [wrapped(within(rows))]
    if beside:
        first = next(iter(beside.values()))
        found += [wrapped(BESIDE), markdown(peers(beside)), origin(first)]
    return "\n\n".join(found)


def table(rows: list[Row], last: Row) -> Table:
    """A line for each schedule, a column for each number of stages and of microbatches."""
    places = sorted({(row.stages, row.microbatches) for row in rows})
    cells = []
    for order in dict.fromkeys(row.order for row in rows):
        of = {(row.stages, row.microbatches): row for row in rows if row.order == order}
        shown = [f"{of[p].measured.median:.3f} ({of[p].theory:.3f})" if p in of else "-" for p in places]
        kept = of[last.stages, last.microbatches].kept
        cells.append([Cell(text) for text in (order, *shown, size(max(kept)) if kept else "-")])
    names = [f"{stages} stages, m = {m}" for stages, m in places]
    return Table(["schedule", *names, "kept"], [False, *[True] * (len(names) + 1)], cells)


def within(rows: list[Row]) -> str:
    """How far the measured bubbles are from the closed forms, and what is kept from its own."""
    near = [row for row in rows if abs(row.of_theory - 1) <= 0.1]
    far = [row for row in rows if row not in near]
    text = f"{len(near)} of {len(rows)} bubbles are within 10 % of the closed form"
    if far:
        named = (
            f"{row.order} on {row.stages} stages with {row.microbatches} microbatches ({row.of_theory:.2f} of "
            f"{row.theory:.3f})"
            for row in far
        )
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
    return filled(page, BEGIN, END, part(result("schedules_paced"), beside))


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
