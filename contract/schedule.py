"""Pipeline schedules as data: what each stage does, in which order. They are made and checked without processes.

The model is cut into parts, and a stage holds one part or several, which are its chunks. An action takes one microbatch
through one chunk: forward (F), or backward (B). The zero-bubble schedules split the backward pass into the gradient of
the input (B), for which the part before waits, and the gradient of the weights (W), for which nobody waits.

    naive         one microbatch at a time: exactly one stage works at any time
    gpipe         all forward passes, then all backward passes (Huang et al., 1811.06965)
    1f1b          backward as soon as possible, which keeps p microbatches instead of m (PipeDream-flush, Narayanan et
                  al., 2006.09503)
    interleaved   1F1B over v chunks a stage, dealt out in turn (Narayanan et al., 2104.04473)
    zb_h1         1F1B with W put off until a stage would be idle (Qi et al., 2401.10241)
    zb_v          two chunks a stage in the shape of a V: the last stage passes on to itself (Qi et al., 2405.15362)

`contract.schedule_time` plays a schedule under given durations; `contract.messages` says what a stage sends when.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

LETTERS = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")


class Action(NamedTuple):
    """One pass of one microbatch through one chunk of a stage. Prints as F0, B3 or W3, and as F0.1 for chunk 1.

    kind: "forward", "backward" (both gradients), "backward_input" or "backward_weight".
    """

    kind: str
    stage: int
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{LETTERS[self.kind]}{self.microbatch}{f'.{self.chunk}' if self.chunk else ''}"


Order = tuple[Action, ...]  # of one stage
Parts = tuple[tuple[int, int], ...]  # (stage, chunk) of every part of the model, in the model's order


@dataclass(frozen=True)
class Schedule:
    """orders[stage]: its actions in their order. parts: where every part of the model lives."""

    name: str
    microbatches: int
    parts: Parts
    orders: tuple[Order, ...]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.orders)

    @property
    def chunks(self) -> int:
        """The number of parts that a stage holds."""
        return len(self.parts) // self.stages

    @property
    def split(self) -> bool:
        """Whether the backward pass is split into B and W."""
        return any(action.kind == "backward_weight" for action in self.orders[0])

    def part(self, action: Action) -> int:
        """The part of the model that an action works on."""
        return self.parts.index((action.stage, action.chunk))

    def at(self, action: Action, part: int) -> Action:
        """The same action on another part."""
        stage, chunk = self.parts[part]
        return action._replace(stage=stage, chunk=chunk)

    def source(self, action: Action) -> Action | None:
        """The action on another part whose result this one needs; None at the ends of the model, and for W."""
        if action.kind == "backward_weight":
            return None
        part = self.part(action) + (-1 if action.kind == "forward" else 1)
        return self.at(action, part) if 0 <= part < len(self.parts) else None

    def target(self, action: Action) -> Action | None:
        """The action on another part that needs this one's result."""
        if action.kind == "backward_weight":
            return None
        part = self.part(action) + (1 if action.kind == "forward" else -1)
        return self.at(action, part) if 0 <= part < len(self.parts) else None

    def needs(self, action: Action) -> list[Action]:
        """The actions that must be done before."""
        source = self.source(action)
        own = {"backward": "forward", "backward_input": "forward", "backward_weight": "backward_input"}.get(action.kind)
        return [*([source] if source else []), *([action._replace(kind=own)] if own else [])]

    def wanted(self) -> set[Action]:
        """All actions of a complete step."""
        kinds = ("forward", "backward_input", "backward_weight") if self.split else ("forward", "backward")
        return {Action(kind, *place, i) for kind in kinds for place in self.parts for i in range(self.microbatches)}


def make(name: str, stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """A schedule by its name. chunks: of a stage, for the interleaved one. Raises ValueError for what cannot be."""
    if stages < 1 or microbatches < 1:
        raise ValueError(f"a schedule needs at least 1 stage and 1 microbatch, got {stages} and {microbatches}")
    if flaw := unfit(name, stages, microbatches, chunks):
        raise ValueError(flaw)
    parts = parts_of(name, stages, chunks)
    order = {"naive": _naive, "gpipe": _gpipe, "1f1b": _one_f_one_b, "zb_h1": _zb_h1, "zb_v": _zb_v}
    if name == "interleaved":
        orders = [_interleaved(stage, stages, microbatches, chunks) for stage in range(stages)]
    else:
        orders = [order[name](stage, stages, microbatches) for stage in range(stages)]
    return Schedule(name, microbatches, parts, tuple(tuple(each) for each in orders))


def unfit(name: str, stages: int, microbatches: int, chunks: int = 2) -> str | None:
    """Why there is no such schedule, in one line; None if there is."""
    if name not in SCHEDULES:
        return f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}"
    if name == "interleaved" and chunks < 2:
        return f"the interleaved schedule needs at least 2 chunks on every stage, got {chunks}; 1f1b has 1"
    if name == "interleaved" and microbatches % stages:
        return (
            f"the interleaved schedule needs a number of microbatches that its {stages} stages divide, "
            f"got {microbatches}"
        )
    if name == "zb_v" and chunks != 2:
        return f"the schedule zb_v has 2 chunks on every stage, got {chunks}"
    return None


def num_chunks(name: str, chunks: int = 2) -> int:
    """How many parts of the model a stage holds."""
    return {"interleaved": chunks, "zb_v": 2}.get(name, 1)


def parts_of(name: str, stages: int, chunks: int = 2) -> Parts:
    """Where the parts of the model live: dealt out in turn, or for zb_v down the stages and up again."""
    down = [(stage, 0) for stage in range(stages)]
    if name == "zb_v":
        return (*down, *((stage, 1) for stage in reversed(range(stages))))
    return tuple((stage, chunk) for chunk in range(num_chunks(name, chunks)) for stage in range(stages))


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes, both in the order of the microbatches."""
    return make("gpipe", stages, microbatches)


def actions(schedule: Schedule, stage: int) -> list[Action]:
    """What one stage does, in order."""
    return list(schedule.orders[stage])


def _naive(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    for i in range(microbatches):
        yield Action("forward", stage, 0, i)
        yield Action("backward", stage, 0, i)


def _gpipe(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    for kind in ("forward", "backward"):
        for i in range(microbatches):
            yield Action(kind, stage, 0, i)


def _one_f_one_b(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """Stage s runs p - s - 1 forward passes ahead, then one forward and one backward pass in turn."""
    ahead = min(stages - stage - 1, microbatches)
    for i in range(microbatches + ahead):
        if i < microbatches:
            yield Action("forward", stage, 0, i)
        if i >= ahead:
            yield Action("backward", stage, 0, i - ahead)


def _interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """As Megatron does it: groups of p microbatches go through chunk 0, then chunk 1, ...; backward in reverse."""
    total = microbatches * chunks
    # With one group of microbatches, every forward pass comes before the first backward pass can follow.
    ahead = total if microbatches == stages else min((chunks - 1) * stages + 2 * (stages - stage - 1), total)

    def action(kind: str, number: int) -> Action:
        group, within = divmod(number, stages * chunks)
        chunk, i = divmod(within, stages)
        chunk = chunk if kind == "forward" else chunks - 1 - chunk
        return Action(kind, stage, chunk, group * stages + i)

    for number in range(total + ahead):
        if number < total:
            yield action("forward", number)
        if number >= ahead:
            yield action("backward", number - ahead)


def _zb_h1(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """1F1B in which stage s puts every W off by s microbatches, so that all stages keep as much as the first."""
    ahead, weights = min(stages - stage - 1, microbatches), 0
    for i in range(microbatches + ahead):
        if i < microbatches:
            yield Action("forward", stage, 0, i)
        if i >= ahead:
            done = i - ahead
            yield Action("backward_input", stage, 0, done)
            if done >= stage:
                yield Action("backward_weight", stage, 0, weights)
                weights += 1
    for i in range(weights, microbatches):
        yield Action("backward_weight", stage, 0, i)


def _zb_v(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """The V of Qi et al., stated for 2 p - 1 microbatches or more; with fewer, those that are too many are left out."""
    enough = max(2 * stages - 1, microbatches)
    forward, backward, weight = [0, 0], [0, 0], [0, 0]

    def act(kind: str, chunk: int, of: list[int]) -> Iterator[Action]:
        if of[chunk] < microbatches:
            yield Action(kind, stage, chunk, of[chunk])
        of[chunk] += 1

    def f(chunk: int) -> Iterator[Action]:
        yield from act("forward", chunk, forward)

    def b(chunk: int) -> Iterator[Action]:
        yield from act("backward_input", chunk, backward)

    def w(chunk: int) -> Iterator[Action]:
        yield from act("backward_weight", chunk, weight)

    for _ in range(2 * (stages - stage) - 1):
        yield from f(0)
    for _ in range(stage):
        yield from (*f(1), *f(0))
    for _ in range(stages - stage):
        yield from (*f(1), *b(1), *w(1))
    while forward[1] < forward[0] or forward[0] < enough:
        if forward[0] < enough:
            yield from f(0)
        yield from (*b(0), *w(0), *f(1), *b(1), *w(1))
    for _ in range(stage):
        yield from (*b(0), *b(1))
    for _ in range(stages - stage):
        yield from (*b(0), *w(0))
    for chunk in (1, 0):
        while weight[chunk] < backward[chunk]:
            yield from w(chunk)
