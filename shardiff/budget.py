"""Limits on what a program may communicate, and a comparison with what it communicated before. For continuous testing.

A budget is a text such as

    all_gather > 1MB                 no single all_gather may have a payload above 1 MB
    forward all_reduce > 0           the forward pass may hold no all_reduce
    tp wire > 20MB                   a rank may send at most 20 MB over the axis tp in all
    update calls > 8                 the update may hold at most 8 calls
    total payload > 1GiB             the whole program's payload

Words before the sign choose records: an op of `shardiff.record.OPS`, a phase, or else the name of an axis. `wire`,
`payload` and `calls` are sums over the records that were chosen; without one of them each record is judged by itself,
by its payload. Sizes are in B, kB, MB, GB (powers of 1000) or KiB, MiB, GiB (of 1024); a number alone is bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shardiff.record import OPS, PHASES, Record, totals
from shardiff.system.words import size

UNITS = {"": 1, "b": 1, **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}}
UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}
SUMS = {"payload": "payload_bytes", "wire": "wire_bytes", "calls": "calls"}
EXAMPLE = "such as 'all_gather > 1MB', 'backward wire > 20MB' or 'tp calls > 8'"


@dataclass(frozen=True)
class Budget:
    """At most `limit`: bytes of each record's payload, or of a sum over all records of this op, phase and axis.

    sum: "payload_bytes", "wire_bytes", "calls", or None for each record by itself. text: as it was given.
    """

    text: str
    limit: int
    op: str | None = None
    phase: str | None = None
    axis: str | None = None
    sum: str | None = None

    def of(self, records: Iterable[Record]) -> list[Record]:
        """The records that the budget is about."""
        return [
            r
            for r in records
            if self.op in (None, r.op) and self.phase in (None, r.phase) and self.axis in (None, r.axis)
        ]


def parse_budget(text: str) -> Budget:
    """Raises ValueError, one line, for what is no budget."""
    words, sign, amount = text.partition(">")
    number = re.fullmatch(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", amount)
    if not sign or number is None or number[2].lower() not in UNITS:
        raise ValueError(f"{text!r} is no budget: write WORDS > SIZE, {EXAMPLE}")
    limit = int(float(number[1].replace(",", "").replace("_", "")) * UNITS[number[2].lower()])
    found: dict[str, str] = {}
    for word in words.split():
        kind = "op" if word in OPS else "phase" if word in PHASES else "sum" if word in (*SUMS, "total") else "axis"
        if kind == "sum" and word == "total":
            continue
        if kind in found:
            raise ValueError(f"{text!r} is no budget: {found[kind]!r} and {word!r} both name an {kind}; {EXAMPLE}")
        found[kind] = word
    if not words.split():
        raise ValueError(f"{text!r} is no budget: say what must stay below, {EXAMPLE}")
    if "total" in words.split() and "sum" not in found:
        found["sum"] = "payload"
    measured = SUMS.get(found.get("sum", ""))
    if measured == "calls" and number[2]:
        raise ValueError(f"{text!r} is no budget: calls are a number without a unit")
    return Budget(text.strip(), limit, found.get("op"), found.get("phase"), found.get("axis"), measured)


def check(program: Iterable[Record], budgets: Iterable[Budget]) -> list[str]:
    """A line for each budget that is exceeded; none if all are kept. program: a Program, or any records of one.

    What has no known upper bound, a loop whose trips nobody knows, counts with its lower one. Raises ValueError where a
    budget names an axis that no record runs along, which would be kept whatever the program does.
    """
    records = list(program)
    axes = sorted({name for r in records if r.axis for name in (r.axis, *r.axis.split(","))})
    broken = []
    for budget in budgets:
        if budget.axis is not None and records and budget.axis not in axes:
            known = f"axes here: {', '.join(axes)}" if axes else "no axis is known here"
            ops = ", ".join(OPS)
            raise ValueError(f"{budget.text!r}: {budget.axis!r} is no op ({ops}), phase or axis ({known})")
        chosen = budget.of(records)
        if budget.sum is not None:
            span = totals(chosen)[budget.sum]
            value = span["min"] if span["max"] is None else span["max"]
            if value > budget.limit:
                unit = f"{value:,} calls" if budget.sum == "calls" else size(value)
                broken.append(f"over budget: {budget.text}: {unit}")
            continue
        over = sorted((r for r in chosen if r.payload_bytes > budget.limit), key=lambda r: -r.payload_bytes)
        if over:
            worst = over[0]
            where = f" at {worst.source}" if worst.source else ""
            more = f", and {len(over) - 1} more" if len(over) > 1 else ""
            broken.append(f"over budget: {budget.text}: {worst.op} of {size(worst.payload_bytes)}{where}{more}")
    return broken


def compare(program: Iterable[Record], baseline: Iterable[Record]) -> list[str]:
    """A line for each kind of communication of which there is more than in the baseline; none if there is not.

    A kind is phase, op and axis. More calls of the same bytes count as more, and so do more bytes in fewer calls.
    """
    now, before = _amounts(program), _amounts(baseline)
    lines = []
    for kind in sorted(now):
        (calls, payload, wire), (old_calls, old_payload, old_wire) = now[kind], before.get(kind, (0, 0, 0))
        if calls > old_calls or payload > old_payload or wire > old_wire:
            phase, op, axis = kind
            what = f"{phase} {op}{f' over {axis}' if axis else ''}"
            had = f"{_calls(old_calls)}, {size(old_payload)}" if kind in before else "none"
            lines.append(f"more than the baseline: {what}: {_calls(calls)}, {size(payload)} payload; it had {had}")
    return lines


def _calls(count: int) -> str:
    return f"{count:,} call{'s' * (count != 1)}"


def _amounts(records: Iterable[Record]) -> dict[tuple[str, str, str], tuple[int, int, int]]:
    """(phase, op, axis or "") -> calls, payload bytes and wire bytes in all."""
    sums: Counter[tuple[tuple[str, str, str], int]] = Counter()
    kinds: dict[tuple[str, str, str], None] = {}
    for r in records:
        kind = r.phase, r.op, r.axis or ""
        times = r.executions.min if r.executions.max is None else r.executions.max
        kinds[kind] = None
        for i, amount in enumerate((times, times * r.payload_bytes, times * r.wire_bytes)):
            sums[kind, i] += amount
    return {kind: (sums[kind, 0], sums[kind, 1], sums[kind, 2]) for kind in kinds}
