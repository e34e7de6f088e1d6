"""Why shard_map and annotated take different times: where the difference lies, and what the programs do differently.

Both columns of `shardiff diff` can be equal and the steps not: then it is the work beside the collectives that differs,
or when they run. The sentences are made of the measured split of a step and of what the compiled programs hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardiff.system.words import size

ALIKE = 0.05  # ratios up to 1.05, either way, need no reason
PAIR = ("shard_map", "annotated")


def reasons(document: dict[str, Any]) -> list[str]:
    """A sentence or two for each pair of programs whose step times differ by more than ALIKE."""
    rows = {(row["strategy"], row["ranks"], row["implementation"]): row for row in document["rows"]}
    result = []
    for ratio in document["ratios"]:
        median = ratio["ratio"]["median"]
        ours, theirs = (rows.get((ratio["strategy"], ratio["ranks"], name)) for name in PAIR)
        differ_in_time = (ratio["of"], ratio["to"]) == PAIR and max(median, 1 / median) > 1 + ALIKE
        if differ_in_time and ours and theirs:
            where = f"{ratio['strategy']} on {ratio['ranks']} ranks"
            parts = [*times(ours, theirs), *work(ours, theirs)]
            result.append(f"{where}, shard_map over annotated {median:.2f}: {'; '.join(parts)}")
    return result


def times(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    """Where the difference of the two steps lies."""
    for key, name in (("compute_seconds", "compute"), ("exposed_seconds", "exposed communication")):
        if ours[key] and theirs[key]:
            yield f"{name} {1e3 * ours[key]['median']:.1f} ms over {1e3 * theirs[key]['median']:.1f} ms"


def work(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    """What one program does and the other does not, or does less of, from their texts and the compiler's plan."""
    mine, other = ours.get("work"), theirs.get("work")
    if mine is None or other is None:
        return
    if differ(ours["wire_bytes_compiled"], theirs["wire_bytes_compiled"]):
        yield f"must send {size(ours['wire_bytes_compiled'])} over {size(theirs['wire_bytes_compiled'])}"
    for count, amount, verb in (
        ("products", "flops", "multiplies"),
        ("transposes", "transposed_bytes", "transposes"),
        ("copies", "copied_bytes", "copies"),
    ):
        if differ(mine[amount], other[amount]):
            unit = flops if amount == "flops" else size
            numbers = (f"{unit(side[amount])} in {side[count]}" for side in (mine, other))
            yield f"{verb} {' over '.join(numbers)}"
    held = [row["memory"]["measured"]["temporaries"] for row in (ours, theirs)]
    if None not in held and differ(*held):
        yield f"needs {size(held[0])} over {size(held[1])} for what lives within a step"


def differ(one: int, other: int) -> bool:
    """By more than ALIKE of the larger."""
    return abs(one - other) > ALIKE * max(one, other)


def flops(count: int) -> str:
    """A number of floating-point operations."""
    return f"{count / 1e9:.3g} GFLOP"
