"""Where a stage keeps what when all stages run one program: every store has numbered slots, as many as are ever full.

A slot is taken from the tick in which a value comes until the tick in which it is last used. What comes later takes the
first slot that is free by then, so a store is as deep as the schedule's peak and not as the number of microbatches.

    inputs      activations that have arrived, until their forward pass
    gradients   gradients of an output that have arrived (from the loss, for the last part), until their backward pass
    residuals   what a forward pass keeps, until its backward pass, or until W
    put_off     gradients inside a chunk, from B until W
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from contract.schedule import Action, Schedule
from contract.schedule_time import Row, rows

STORES = ("inputs", "gradients", "residuals", "put_off")


@dataclass(frozen=True)
class Slots:
    """rows: of the schedule. of[store][action]: the slot of what an action needs or keeps. depth[store]: how many."""

    rows: tuple[Row, ...]
    of: dict[str, dict[Action, int]]
    depth: dict[str, int]


def slots(schedule: Schedule) -> Slots:
    """The slots of every stage, and of each store as many as the stage with most needs."""
    ticks = rows(schedule)
    when = {action: tick for tick, row in enumerate(ticks) for action in row if action is not None}
    last = "backward_weight" if schedule.split else "backward"
    taken: dict[str, list[tuple[int, int, Action]]] = {store: [] for store in STORES}  # (from, to, by which action)
    for action, tick in when.items():
        source = schedule.source(action)
        if action.kind == "forward":
            if source is not None:
                taken["inputs"].append((when[source] + 1, tick, action))
            taken["residuals"].append((tick, when[action._replace(kind=last)], action))
        elif action.kind == "backward_weight":
            taken["put_off"].append((when[action._replace(kind="backward_input")], tick, action))
        else:  # of the last part, the loss's gradient comes with its own forward pass
            came = source if source is not None else action._replace(kind="forward")
            taken["gradients"].append((when[came] + 1, tick, action))
    of: dict[str, dict[Action, int]] = {}
    for store, intervals in taken.items():
        of[store] = {}
        for stage in range(schedule.stages):
            of[store] |= allot(each for each in intervals if each[2].stage == stage)
    return Slots(ticks, of, {store: max(found.values(), default=-1) + 1 for store, found in of.items()})


def receiver(schedule: Schedule, action: Action) -> Action | None:
    """The action that takes an action's result. From the last part, the loss's gradient goes to its own B."""
    if action.kind == "forward" and schedule.target(action) is None:
        return action._replace(kind="backward_input" if schedule.split else "backward")
    return schedule.target(action)


def allot(intervals: Iterable[tuple[int, int, Action]]) -> dict[Action, int]:
    """The first slot that is free from the first tick to the last, both included."""
    until: list[int] = []  # of each slot
    found: dict[Action, int] = {}
    for start, end, action in sorted(intervals):
        slot = next((i for i, busy in enumerate(until) if busy < start), len(until))
        until[slot:] = [end, *until[slot + 1 :]]
        found[action] = slot
    return found
