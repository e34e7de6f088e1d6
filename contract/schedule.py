"""Pipeline schedules as data: which stage does what in which tick. They are made and checked without processes.

A tick is the time of one microbatch's forward or backward pass through one stage; both are counted as equal. A stage
does at most one action in a tick. The ticks in which it does nothing are its bubble.

GPipe (Huang et al., 1811.06965) runs all forward passes and then all backward passes. With p stages and m microbatches
it takes 2 (m + p - 1) ticks, in 2 m of which each stage works, so the bubble fraction is (p - 1) / (m + p - 1).
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple


class Action(NamedTuple):
    """One pass of one microbatch through one chunk of one stage's layers. Prints as F0 or B3, and as F0.1 for chunk 1.

    kind: "forward" or "backward". chunk: which part, in a stage that holds several parts of the model; otherwise 0.
    """

    kind: str
    stage: int
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.microbatch}{f'.{self.chunk}' if self.chunk else ''}"


Schedule = tuple[tuple[Action | None, ...], ...]  # schedule[tick][stage]


def naive(stages: int) -> Schedule:
    """One microbatch, which is the whole batch: exactly one stage works at any time."""
    return gpipe(stages, 1)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes, both in the order of the microbatches."""
    if stages < 1 or microbatches < 1:
        raise ValueError(f"a schedule needs at least 1 stage and 1 microbatch, got {stages} and {microbatches}")
    ticks = range(microbatches + stages - 1)

    def row(kind: str, starts: list[int], tick: int) -> tuple[Action | None, ...]:
        passes = [(stage, tick - start) for stage, start in enumerate(starts)]
        return tuple(Action(kind, stage, 0, m) if 0 <= m < microbatches else None for stage, m in passes)

    down = list(range(stages))  # stage s starts s ticks after stage 0; backward, s ticks after the last stage
    return tuple(row("forward", down, t) for t in ticks) + tuple(row("backward", down[::-1], t) for t in ticks)


def actions(schedule: Schedule, stage: int) -> list[Action]:
    """What one stage does, in order."""
    return [row[stage] for row in schedule if row[stage] is not None]  # type: ignore[misc]


def bubble_fraction(schedule: Schedule) -> Fraction:
    """Idle stage-ticks over all stage-ticks, counted in the schedule."""
    cells = [action for row in schedule for action in row]
    return Fraction(sum(action is None for action in cells), len(cells))


def gpipe_bubble_fraction(stages: int, microbatches: int) -> Fraction:
    """The closed form (p - 1) / (m + p - 1)."""
    return Fraction(stages - 1, microbatches + stages - 1)


def table(schedule: Schedule) -> str:
    """One row per stage, one column per tick; '.' is the bubble."""
    cells = [[str(action or ".") for action in column] for column in zip(*schedule, strict=True)]
    width = max(len(cell) for row in cells for cell in row)
    label = len(f"stage {len(cells) - 1}")
    return "\n".join(
        f"stage {stage}".ljust(label) + "  " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for stage, row in enumerate(cells)
    )


def check(schedule: Schedule, microbatches: int) -> None:
    """Raise ValueError unless the schedule is complete and every action comes after what it needs.

    The forward pass of microbatch i on stage s needs the one on stage s - 1. The backward pass on s needs the one on s
    + 1 and the forward pass on s. Each must be in an earlier tick. Every stage runs every pass exactly once.
    """
    stages = len(schedule[0])
    done: dict[Action, int] = {}  # -> tick
    for tick, row in enumerate(schedule):
        if len(row) != stages:
            raise ValueError(f"tick {tick} has {len(row)} stages, tick 0 has {stages}")
        for stage, action in enumerate(row):
            if action is None:
                continue
            if action.stage != stage:
                raise ValueError(f"tick {tick}: {action} of stage {action.stage} is on stage {stage}")
            if action in done:
                raise ValueError(f"{action} runs twice on stage {stage}: in ticks {done[action]} and {tick}")
            for need in _needs(action, stages):
                if done.get(need, tick) >= tick:
                    raise ValueError(f"tick {tick}: {action} on stage {stage} runs before {need} on stage {need.stage}")
            done[action] = tick
    kinds = ("forward", "backward")
    wanted = {Action(k, s, 0, m) for k in kinds for m in range(microbatches) for s in range(stages)}
    if missing := sorted(wanted - done.keys()):
        count = "1 pass is" if len(missing) == 1 else f"{len(missing)} passes are"
        raise ValueError(f"{count} missing, first {missing[0]} on stage {missing[0].stage}")
    if extra := sorted(done.keys() - wanted):
        raise ValueError(f"unknown pass {extra[0]} on stage {extra[0].stage} of {microbatches} microbatches")


def _needs(action: Action, stages: int) -> list[Action]:
    """The actions that must be done before."""
    if action.kind == "forward":
        return [action._replace(stage=action.stage - 1)] if action.stage else []
    later = [action._replace(stage=action.stage + 1)] if action.stage + 1 < stages else []
    return [action._replace(kind="forward"), *later]
