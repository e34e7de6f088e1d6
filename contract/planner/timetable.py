"""A pipeline's schedule with what the planner needs of it: a replay with given times, and its longest chain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from contract.schedule import Schedule, gpipe
from contract.strategy import Run


@dataclass(frozen=True)
class Timetable:
    """schedule: empty without a pipeline. chain: of the first stage."""

    schedule: Schedule
    chain: Chain


def timetable(run: Run) -> Timetable:
    """Of the pipeline of a run."""
    return _timetable(run.size("pipeline_parallel"), run.microbatches)


@lru_cache(256)
def _timetable(stages: int, microbatches: int) -> Timetable:
    if stages == 1:
        return Timetable((), Chain(1, 1, 0))
    schedule = gpipe(stages, microbatches)
    return Timetable(schedule, critical(schedule))


@dataclass(frozen=True)
class Chain:
    """How many passes and messages follow one another in the longest chain of a schedule, if a backward pass takes
    twice as long as a forward pass. With other times another chain may be longer, so a bound is what this one takes."""

    forward: int
    backward: int
    messages: int


def critical(schedule: Schedule) -> Chain:
    """The chain that ends with the last action of the first stage."""
    stages, small = len(schedule[0]), 1e-6

    def end(forward: float, backward: float, message: float) -> float:
        idle = replay(schedule, [forward] * stages, [backward] * stages, [(message, 0.0)] * (stages - 1))
        work = sum((forward if a.kind == "forward" else backward) for row in schedule if (a := row[0]) is not None)
        return idle[0] + work

    whole = end(1.0, 2.0, 0.0)
    slopes = end(1 + small, 2.0, 0.0), end(1.0, 2 + small, 0.0), end(1.0, 2.0, small)
    return Chain(*(round((one - whole) / small) for one in slopes))


def replay(
    schedule: Schedule, forward: list[float], backward: list[float], messages: list[tuple[float, float]]
) -> list[float]:
    """Seconds that each stage is idle before its last pass ends.

    forward, backward: seconds of a pass of each stage. messages: of the boundaries between stages: how long a message
    takes on the link, and how long it is on its way after that.
    """
    stages = len(forward)
    free, worked = [0.0] * stages, [0.0] * stages
    down_links, up_links = [0.0] * stages, [0.0] * stages
    done: dict[tuple[str, int, int], list[float]] = {}
    for row in schedule:
        for action in row:
            if action is None:
                continue
            kind, stage, chunk, microbatch = action
            arrived = done.get((kind, chunk, microbatch))
            if arrived is None:
                arrived = done[kind, chunk, microbatch] = [0.0] * stages
            start = arrived[stage] if arrived[stage] > free[stage] else free[stage]
            if kind == "forward":
                taken, links, boundary, to = forward[stage], down_links, stage, stage + 1
            else:
                taken, links, boundary, to = backward[stage], up_links, stage - 1, stage - 1
            free[stage] = end = start + taken
            worked[stage] += taken
            if 0 <= to < stages:
                sending, way = messages[boundary]
                links[boundary] = busy = (links[boundary] if links[boundary] > end else end) + sending
                arrived[to] = busy + way
    return [end - busy for end, busy in zip(free, worked, strict=True)]
