"""The vocabulary of a rank's program, and where the collectives of a pass belong.

It follows from what a strategy says that it sends (`contract.strategies`): what it is tells when it starts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import NamedTuple

from contract import strategies
from contract.schedule import Action
from contract.share import Part, Pass, Sent, Share, length
from contract.strategy import Run

# Detail of what is sent, and its phase -> place. The number is that of the layer.
PLACES = {
    (r"input of layer (\d+)", "forward"): "before forward",
    (r"output of layer (\d+)", "forward"): "after forward",
    (r"gradient of the input of layer (\d+)", "backward"): "after backward",
    (r"gradient of [wb](\d+)", "backward"): "gradient",
    (r"gradient of w(\d+) and b\d+", "backward"): "scatter",
    (r"w(\d+)(?: and b\d+)?", "forward"): "gather",
    (r"w(\d+)(?: and b\d+)?", "backward"): "gather again",
    (r"[wb](\d+)(?: and b\d+)?", "update"): "gather updated",
    (r"loss", "forward"): "loss",
}


class Compute(NamedTuple):
    """The device computes. what: forward, backward or update."""

    seconds: float
    what: str


class Begin(NamedTuple):
    """Start a collective of the rank's group along an axis. payload: bytes, as a record counts them."""

    key: str
    axis: str
    op: str
    payload: int


class End(NamedTuple):
    """Wait for a collective that this rank has started."""

    key: str


class Send(NamedTuple):
    """Start to send a message of so many bytes to a stage; nobody waits here."""

    key: str
    to: int
    size: int


class Post(NamedTuple):
    """Be ready to receive a message: only then do its bytes move."""

    key: str


class Receive(NamedTuple):
    """Wait for a message."""

    key: str


Instruction = Compute | Begin | End | Send | Post | Receive
Instructions = list[Instruction]
Kind = tuple[int, int]  # of passes: their rows, and their first layer


@cache
def place_of(detail: str, phase: str) -> tuple[str, int] | None:
    """(place, layer) of the table; the layer of the loss is -1."""
    for (pattern, of), place in PLACES.items():
        if of == phase and (found := re.fullmatch(pattern, detail)):
            return place, int(found[1]) if found.groups() else -1
    return None


@dataclass
class Placed:
    """The collectives of one pass: what starts before or after what. (place, layer) -> [(axis, what)]."""

    at: dict[tuple[str, int], list[tuple[str, Sent]]] = field(default_factory=dict)

    def add(self, axis: str, sent: Sent) -> None:
        """Raises ValueError for something that the table above does not have."""
        if (where := place_of(sent.detail, sent.phase)) is None:
            raise ValueError(f"the planner does not know when {sent.op} of {sent.detail} on {axis} is started")
        self.at.setdefault(where, []).append((axis, sent))

    def get(self, place: str, layer: int = -1) -> list[tuple[str, Sent]]:
        """What belongs there, the innermost axis first."""
        return self.at.get((place, layer), [])


def shape_of(part: Part, run: Run) -> tuple[int, int]:
    """[in, out] of a layer's weight, as a rank computes with it."""
    rows, columns = (length(s, run.problem.width) for s in part.cuts.w)
    gathered = prod(axis.size for axis in run.axes if strategies.gathers(axis.strategy))
    return gathered * rows, columns


def placed_of(run: Run, mine: Share, one: Pass) -> Placed:
    """When each collective of one pass starts. The innermost axis comes first."""
    placed = Placed()
    for axis in reversed(run.axes):
        if axis.size == 1 or axis.strategy == "pipeline_parallel":
            continue
        for sent in strategies.of(axis.strategy).communication(replace(mine, passes=(one,)), axis.size):
            placed.add(axis.name, sent)
    return placed


def message(action: Action) -> str:
    """The name of an action's result."""
    return f"{action} of stage {action.stage}"
