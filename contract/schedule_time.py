"""A schedule in time: when every action runs under given durations, its bubble, and what its stages keep.

The order of a stage is given, and an action starts as soon as its stage is free and what it needs is done. The bubble
follows: it is computed from this play, and the closed forms beside it are tested against it.

With p stages, m microbatches, v chunks a stage, and F, B and W the durations of a whole stage's passes, the time that a
stage is idle is

    naive         m (p - 1) (F + B + W)
    gpipe, 1f1b   (p - 1) (F + B + W)
    interleaved   (p - 1) (F + B + W) / v
    zb_h1         (p - 1) (F + B - W)       if m >= p and W is no longer than F or B
    zb_v          (p - 1) F / 2             if m >= 2 p - 1 and F = B = W

and the bubble fraction is that over itself and m (F + B + W).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from contract.schedule import Action, Schedule

Row = tuple[Action | None, ...]  # what each stage begins in a tick


class Costs(NamedTuple):
    """Durations of a whole stage's passes, in any unit; a chunk takes its share. A whole backward pass takes B + W."""

    forward: int = 1
    backward_input: int = 1
    backward_weight: int = 1

    def of(self, kind: str) -> int:
        """The duration of an action."""
        return self[1] + self[2] if kind == "backward" else getattr(self, kind)


class Deadlock(ValueError):
    """Actions that wait for each other, in one line."""


def play(schedule: Schedule, costs: Mapping[Action, int] | Costs = Costs()) -> dict[Action, tuple[int, int]]:
    """Action -> (start, end). costs: of every action, or of every kind of action on one chunk.

    Raises Deadlock if the orders of the stages cannot finish.
    """
    done: dict[Action, tuple[int, int]] = {}
    free, at = [0] * schedule.stages, [0] * schedule.stages
    while True:
        moved = False
        for stage, order in enumerate(schedule.orders):
            while at[stage] < len(order):
                action = order[at[stage]]
                needs = schedule.needs(action)
                if not all(need in done for need in needs):
                    break
                taken = costs.of(action.kind) if isinstance(costs, Costs) else costs[action]
                start = max([free[stage], *(done[need][1] for need in needs)])
                done[action] = start, start + taken
                free[stage] = start + taken
                at[stage] += 1
                moved = True
        if not moved:
            break
    if stuck := [order[at[stage]] for stage, order in enumerate(schedule.orders) if at[stage] < len(order)]:
        raise Deadlock(f"deadlock: {'; '.join(_waits(schedule, action, done) for action in stuck)}")
    return done


def _waits(schedule: Schedule, action: Action, done: Mapping[Action, object]) -> str:
    need = next(need for need in schedule.needs(action) if need not in done)
    return f"{action} on stage {action.stage} waits for {need} on stage {need.stage}"


def check(schedule: Schedule) -> None:
    """Raise ValueError unless every stage runs each of its passes exactly once, in an order that can finish."""
    seen: set[Action] = set()
    wanted = schedule.wanted()
    for stage, order in enumerate(schedule.orders):
        for action in order:
            if action.stage != stage:
                raise ValueError(f"{action} of stage {action.stage} is on stage {stage}")
            if action in seen:
                raise ValueError(f"{action} runs twice on stage {stage}")
            if action not in wanted:
                raise ValueError(
                    f"unknown pass {action} on stage {stage} of {schedule.microbatches} microbatches and "
                    f"{schedule.chunks} chunks"
                )
            seen.add(action)
    if missing := sorted(wanted - seen):
        count = "1 pass is" if len(missing) == 1 else f"{len(missing)} passes are"
        raise ValueError(f"{count} missing, first {missing[0]} on stage {missing[0].stage}")
    play(schedule)


def check_rows(schedule: Schedule, rows: Sequence[Row]) -> None:
    """Raise ValueError unless every action is in a later row than what it needs."""
    when = {action: tick for tick, row in enumerate(rows) for action in row if action is not None}
    for tick, row in enumerate(rows):
        for stage, action in enumerate(row):
            if action is None:
                continue
            if action.stage != stage:
                raise ValueError(f"tick {tick}: {action} of stage {action.stage} is on stage {stage}")
            for need in schedule.needs(action):
                if when.get(need, tick) >= tick:
                    raise ValueError(f"tick {tick}: {action} on stage {stage} runs before {need} on stage {need.stage}")
    if missing := sorted(schedule.wanted() - when.keys()):
        raise ValueError(f"{missing[0]} on stage {missing[0].stage} is in no tick")


def rows(schedule: Schedule) -> tuple[Row, ...]:
    """The schedule in ticks in which every action, whatever its kind, takes one: [tick][stage]."""
    done = play(schedule, {action: 1 for order in schedule.orders for action in order})
    table: list[list[Action | None]] = [[None] * schedule.stages for _ in range(max(end for _, end in done.values()))]
    for action, (start, _) in done.items():
        table[start][action.stage] = action
    return tuple(tuple(row) for row in table)


def makespan(schedule: Schedule, costs: Costs = Costs()) -> int:
    """From the first start to the last end, in units of which a chunk's pass takes `costs`."""
    return max(end for _, end in play(schedule, costs).values())


def bubble_fraction(schedule: Schedule, costs: Costs = Costs()) -> Fraction:
    """Idle stage-time over all stage-time, counted in the play of the schedule."""
    work = sum(costs.of(action.kind) for order in schedule.orders for action in order)
    return 1 - Fraction(work, schedule.stages * makespan(schedule, costs))


def closed_form(name: str, stages: int, microbatches: int, chunks: int = 2, costs: Costs = Costs()) -> Fraction | None:
    """The bubble fraction as a formula (see above); None where the formula does not hold."""
    p, m, (f, b, w) = stages, microbatches, costs
    idle = {
        "naive": m * (p - 1) * Fraction(f + b + w),
        "gpipe": (p - 1) * Fraction(f + b + w),
        "1f1b": (p - 1) * Fraction(f + b + w),
        "interleaved": (p - 1) * Fraction(f + b + w, chunks),
        "zb_h1": (p - 1) * Fraction(f + b - w) if m >= p and w <= min(f, b) else None,
        "zb_v": (p - 1) * Fraction(f, 2) if m >= 2 * p - 1 and f == b == w else None,
    }[name]
    return None if idle is None else idle / (idle + m * (f + b + w))


def peaks(schedule: Schedule) -> list[int]:
    """For each stage, the most microbatches x chunks that it keeps activations of at any time, counted.

    Those of a microbatch are kept from its F until its B, or until its W where the two are split.
    """
    last = "backward_weight" if schedule.split else "backward"
    most = []
    for order in schedule.orders:
        kept, peak = 0, 0
        for action in order:
            kept += action.kind == "forward"
            peak = max(peak, kept)
            kept -= action.kind == last
        most.append(peak)
    return most


def closed_form_peak(name: str, stages: int, microbatches: int, stage: int, chunks: int = 2) -> int:
    """The same as a formula, for stage s of p: 1F1B keeps p - s microbatches, and not m."""
    p, m, s = stages, microbatches, stage
    if name == "interleaved":
        return m * chunks if m == p else min((chunks - 1) * p + 2 * (p - s - 1) + 1, m * chunks)
    of_v = min(2 * p, 2 * m, m + s + 1)
    return {"naive": 1, "gpipe": m, "1f1b": min(p - s, m), "zb_h1": min(p, m), "zb_v": of_v}[name]


def table(schedule: Schedule, costs: Costs = Costs()) -> str:
    """One row per stage, one column per unit of time; '.' is the bubble, '-' is an action that goes on."""
    done = play(schedule, costs)
    end = max(end for _, end in done.values())
    cells = [["."] * end for _ in range(schedule.stages)]
    for action, (start, stop) in done.items():
        cells[action.stage][start:stop] = [str(action), *["-"] * (stop - start - 1)]
    width = max(len(cell) for row in cells for cell in row)
    label = len(f"stage {len(cells) - 1}")
    return "\n".join(
        f"stage {stage}".ljust(label) + "  " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for stage, row in enumerate(cells)
    )
