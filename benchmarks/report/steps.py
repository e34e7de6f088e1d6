"""The chapter on training steps."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.documents.steps import KINDS, Steps
from benchmarks.report import pictures
from benchmarks.report.blocks import Block, Cell, Details, Items, Table, Text, from_rich
from benchmarks.report.pictures import Draw
from benchmarks.steps import picture, view, why
from benchmarks.steps.numbers import PEERS
from benchmarks.words import counted
from shardiff.system.words import size


def summary(result: Steps) -> Iterator[str]:
    ranks = max((row.ranks for row in result.rows), default=0)
    ratios = [row for row in result.ratios if row.ranks == ranks]
    over_peers = [r for r in ratios if r.of == "torch" and r.to in PEERS.get(r.strategy, ())]
    pairs = {
        "torch over the library equivalent": over_peers,
        "shard_map over annotated": [r for r in ratios if (r.of, r.to) == ("shard_map", "annotated")],
        "torch over annotated": [r for r in ratios if (r.of, r.to) == ("torch", "annotated")],
    }
    for name, rows in pairs.items():
        each = (f"{r.strategy}{' / ' + r.to if r in over_peers else ''} {r.ratio.median:.2f}" for r in rows)
        if rows:
            yield f"Step time on {counted(ranks, 'rank')}, {name}: {', '.join(each)}."
    memories = [row.memory for row in result.rows if row.memory.closed_form]
    held = [(memory.measured.state, memory.closed_form.state) for memory in memories if memory.closed_form]
    shares = [measured / formula for measured, formula in held if measured is not None and formula]
    if shares:
        worst = max(shares, key=lambda share: abs(share - 1))
        yield (
            "The measured bytes of parameters, gradients and optimizer state agree with the closed form for every "
            f"contestant, to within {abs(worst - 1):.1%}."
        )
    yield from (f"Trained differently: {failure}." for failure in result.failures)


def blocks(result: Steps, draw: Draw) -> Iterator[Block]:
    if result.rows:
        text = "Step time of every contestant, split into compute and exposed communication, whiskers at the quartiles"
        yield from draw("steps", text, lambda path: picture.picture(result, path))
    yield from_rich(view.ratio_table(result), "Ratios of step times")
    if view.recomputed(result):
        yield from_rich(view.recompute_table(result), "What recomputing costs and saves, over keeping everything")
    if result.single_device:
        yield from_rich(view.rate_table(result), "What a single device reaches of its own rates")
    title = "Step times, memory held and wire bytes"
    yield Details(title, [from_rich(view.step_table(result), title)])
    if any(any(row.memory.measured.by_kind().values()) for row in result.rows):
        text = "Memory of the rank that holds most, measured and by the closed form, by kind"
        yield from draw("memory", text, lambda path: pictures.memory(result, path))
        yield Details("Memory by kind", [memory_table(result)])
    if reasons := why.reasons(result):
        yield Details("Where shard_map and annotated differ", [Items([f"{reason}." for reason in reasons])])
    if lines := list(view.left_out(result)):
        yield Items([f"{line}." for line in lines])
    yield Text(view.setting(result) + ".", "note")
    yield Details("How it was measured", [Items([f"{name}: {how}." for name, how in result.method.items()])])


def memory_table(result: Steps) -> Table:
    """Measured bytes of every kind, and by the closed form."""
    rows = []
    for row in result.rows:
        measured = row.memory.measured.by_kind()
        formula = row.memory.closed_form.by_kind() if row.memory.closed_form else dict.fromkeys(KINDS)
        pairs = ([side[kind] for side in (measured, formula)] for kind in KINDS)
        cells = [" / ".join("-" if count is None else size(count) for count in pair) for pair in pairs]
        rows.append([Cell(cell) for cell in (*row.key, row.label, *cells)])
    columns = ["strategy", "ranks", "implementation", *(kind.replace("_", " ") for kind in KINDS)]
    return Table(columns, [False, True, False] + [True] * len(KINDS), rows, "measured / closed form")
