"""What README.md and docs/benchmarks.md say of the MLP's training steps: `python -m benchmarks.report.training_steps`.

It is made from the newest results, and stands between two comments. With the word `commands` behind it, it prints what
measures it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.documents import kept
from benchmarks.documents.results_io import parse, read_file
from benchmarks.documents.steps import Row, Steps
from benchmarks.report.blocks import Cell, Table
from benchmarks.report.markdown import filled, markdown
from benchmarks.report.transformer import milliseconds, origin, share, together, wrapped
from benchmarks.steps import view
from benchmarks.steps.numbers import PEERS
from shardiff.system.files import write

PAGES = (kept.ROOT / "README.md", kept.ROOT / "docs" / "benchmarks.md")
BEGIN, END = "<!-- made by benchmarks.report.training_steps -->", "<!-- end of training steps -->"
COMMANDS = {  # what measures each result, and the results' names
    "steps": "bench steps --iterations 24 --rounds 2",
    "steps_meshes": "bench steps --mesh dp=2,fsdp=2 --mesh dp=2,tp=2 --mesh fsdp=2,tp=2 --iterations 24 --rounds 2",
}
NAMES = {
    "ddp": "DistributedDataParallel",
    "dtensor": "DTensor parallelize_module",
    "pipelining": "torch.distributed.pipelining GPipe",
    "fsdp2": "FSDP2",
    "ddp_zero": "DistributedDataParallel, ZeroRedundancyOptimizer",
    "dtensor_ddp": "DTensor, DistributedDataParallel",
    "dtensor_fsdp2": "DTensor, FSDP2",
}


def part(steps: Steps, meshes: Steps) -> str:
    """The text between the comments."""
    both = together(steps, meshes)
    said = wrapped(" ".join(sentences(both)))
    measured = [origin(steps, view.setting(steps)), f"The meshes of two axes: {origin(meshes)}"]
    return "\n\n".join([markdown(table(both)), *map(wrapped, measured), said])


def table(result: Steps) -> Table:
    """Each strategy on each mesh: ours over the library equivalent, and the two programs of JAX."""
    rows = {(row.key, row.implementation): row for row in result.rows}
    ratios = {(ratio.key, ratio.of, ratio.to): ratio for ratio in result.ratios}
    cells = []
    keys = list(dict.fromkeys(row.key for row in result.rows if row.ranks > 1))
    strategies = [strategy for strategy, _ in keys]
    for key in sorted(keys, key=lambda key: strategies.index(key[0])):
        peer = next((name for name in PEERS.get(key[0], ()) if (key, name) in rows), "")
        times = {name: milliseconds(rows.get((key, name))) for name in ("torch", peer, "shard_map", "annotated")}
        over = [share(ratios.get((key, *pair))) for pair in (("torch", peer), ("shard_map", "annotated"))]
        theirs = f"{NAMES[peer]} {times[peer]}" if peer else "-"
        texts = [*key, times["torch"], theirs, over[0], times["shard_map"], times["annotated"], over[1]]
        cells.append([Cell(text) for text in texts])
    columns = ["strategy", "ranks", "torch, explicit", "library equivalent", "explicit / equivalent (quartiles)"]
    columns += ["shard_map", "annotated", "shard_map / annotated (quartiles)"]
    return Table(columns, [False, True, True, False, True, True, True, True], cells)


def sentences(result: Steps) -> Iterator[str]:
    """What the data say of the library equivalents, of memory and of a single device."""
    over = [r for r in result.ratios if r.of == "torch" and r.to in PEERS.get(r.strategy, ()) and r.ranks > 1]
    slower = [f"{r.strategy} on {r.on} ({r.ratio.median:.2f})" for r in over if round(r.ratio.median, 2) > 1]
    told = f"; it takes longer in {', '.join(slower)}" if slower else ""
    yield (
        f"Ours takes at most as long as its library equivalent in {len(over) - len(slower)} of {len(over)} "
        f"medians{told}."
    )
    if off := [abs(held / formula - 1) for row in result.rows for held, formula in state(row)]:
        within = max(0.1, 100 * max(off))
        yield f"Parameters, gradients and optimizer state agree with the closed form to within {within:.1f} %."
    if reached := [f"{one.share.median:.2f} ({one.framework})" for one in result.single_device]:
        yield f"A single device reaches {' and '.join(reached)} of the rate of its matrix products."


def state(row: Row) -> Iterator[tuple[int, int]]:
    """Bytes of parameters, gradients and optimizer state of ours, as measured and from the closed form."""
    memory = row.memory
    if not row.peer and memory.closed_form and memory.measured.state and memory.closed_form.state:
        yield memory.measured.state, memory.closed_form.state


def replaced(page: str) -> str:
    """The page with the part made anew."""
    return filled(page, BEGIN, END, part(*map(result, COMMANDS)))


def result(name: str) -> Steps:
    """The newest result of this name."""
    file = kept.newest(name)
    found = None if file is None else parse(*next(iter(read_file(file).items())))
    if not isinstance(found, Steps):
        raise FileNotFoundError(f"no results of {name} in benchmarks/results")
    return found


def lines() -> list[str]:
    """The commands that measure everything, and then make the part."""
    measuring = [f".venv/bin/shardiff {line} --output {kept.of_today(name)}" for name, line in COMMANDS.items()]
    return [*measuring, ".venv/bin/python -m benchmarks.report.training_steps"]


def main() -> None:
    """Write the part into both pages."""
    for page in PAGES:
        write(page, replaced(page.read_text(encoding="utf-8")))


if __name__ == "__main__":
    print("\n".join(lines())) if sys.argv[1:] == ["commands"] else main()
