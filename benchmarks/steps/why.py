"""Why shard_map and annotated take different times: where the difference lies, and what the programs do differently.

Two programs can communicate the same and yet differ in step time: then the work beside the collectives differs, or when
they run. The sentences follow from the measured split of a step and from what the compiled programs hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.documents.steps import Row, Steps
from shardiff.system.words import size

ALIKE = 0.05  # ratios up to 1.05, either way, need no reason
PAIR = ("shard_map", "annotated")


def reasons(result: Steps) -> list[str]:
    """A sentence for each pair of programs whose step times differ by more than ALIKE."""
    rows = {(row.key, row.label): row for row in result.rows}
    told = []
    for ratio in result.ratios:
        median = ratio.ratio.median
        ours, theirs = (rows.get((ratio.key, name)) for name in PAIR)
        differ_in_time = (ratio.of, ratio.to) == PAIR and median > 0 and max(median, 1 / median) > 1 + ALIKE
        if differ_in_time and ours and theirs:
            where = f"{ratio.strategy} on {ratio.on}"
            parts = [*times(ours, theirs), *work(ours, theirs)]
            told.append(f"{where}, shard_map over annotated {median:.2f}: {'; '.join(parts)}")
    return told


def times(ours: Row, theirs: Row) -> Iterator[str]:
    """Where the difference between the two steps lies."""
    for name, mine, other in (
        ("compute", ours.compute_seconds, theirs.compute_seconds),
        ("exposed communication", ours.exposed_seconds, theirs.exposed_seconds),
    ):
        if mine and other:
            yield f"{name} {1e3 * mine.median:.1f} ms over {1e3 * other.median:.1f} ms"


def work(ours: Row, theirs: Row) -> Iterator[str]:
    """What one program does and the other does not, or does less of, from their texts and the compiler's plan."""
    mine, other = ours.work, theirs.work
    if mine is None or other is None:
        return
    if differ(ours.wire_bytes_compiled, theirs.wire_bytes_compiled):
        yield f"must send {size(ours.wire_bytes_compiled or 0)} over {size(theirs.wire_bytes_compiled or 0)}"
    for verb, amount, unit, counts in (
        ("multiplies", (mine.flops, other.flops), flops, (mine.products, other.products)),
        ("transposes", (mine.transposed_bytes, other.transposed_bytes), size, (mine.transposes, other.transposes)),
        ("copies", (mine.copied_bytes, other.copied_bytes), size, (mine.copies, other.copies)),
    ):
        if differ(*amount):
            numbers = (f"{unit(each)} in {count}" for each, count in zip(amount, counts, strict=True))
            yield f"{verb} {' over '.join(numbers)}"
    held = [row.memory.measured.temporaries for row in (ours, theirs)]
    if differ(*held):
        yield f"needs {size(held[0] or 0)} over {size(held[1] or 0)} for what lives within a step"


def differ(one: int | None, other: int | None) -> bool:
    """Whether two numbers differ by more than ALIKE of the larger; what is not known does not."""
    return one is not None and other is not None and abs(one - other) > ALIKE * max(one, other)


def flops(count: float) -> str:
    """A number of floating-point operations."""
    return f"{count / 1e9:.3g} GFLOP"
