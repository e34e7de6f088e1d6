"""What one rank does in one training step, as a list of instructions, in the order in which torch_impl does it.

It follows from what the contract says of every strategy: what a rank holds (`contract.layout`), what it sends
(`contract.strategies`), the buckets of its gradients (`contract.buckets`) and the pipeline's schedule
(`contract.schedule`). Of a collective it is only decided here when it starts, and who waits for it:

    input of a layer                before the layer's forward pass, which waits for it
    output of a layer               after its product, and the next layer waits for it
    gradient of a layer's input     after the layer's backward pass, and the one before waits for it
    gradient of a parameter         as soon as it is ready, in buckets; the update waits for all of them
    loss                            after the forward passes; the update waits for it

A bias's gradient is ready before its layer's products, a weight's after both of them. A stage of a pipeline posts the
receive for its next action before it computes, as `torch_impl/explicit/pipeline_parallel.py` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from contract import strategies
from contract.buckets import bucketed
from contract.layout import share
from contract.planner.work import seconds, update_bytes
from contract.problem import BYTES
from contract.schedule import Action, Schedule, actions
from contract.share import Part, Pass, Sent, Share
from contract.strategy import Axis, Run
from shardiff.devices import Device

PLACES = {
    r"input of layer (\d+)": "before forward",
    r"output of layer (\d+)": "after forward",
    r"gradient of the input of layer (\d+)": "after backward",
    r"gradient of [wb](\d+)": "gradient",
    r"loss": "loss",
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


@dataclass
class Placed:
    """The collectives of one pass: what starts before or after what. (place, layer) -> [(axis, what)]."""

    at: dict[tuple[str, int], list[tuple[str, Sent]]] = field(default_factory=dict)

    def add(self, axis: str, sent: Sent) -> None:
        """Raises ValueError for something that the table above does not have."""
        for pattern, place in PLACES.items():
            if found := re.fullmatch(pattern, sent.detail):
                layer = int(found[1]) if found.groups() else -1
                self.at.setdefault((place, layer), []).append((axis, sent))
                return
        raise ValueError(f"the planner does not know when {sent.op} of {sent.detail} on {axis} is started")

    def get(self, place: str, layer: int) -> list[tuple[str, Sent]]:
        return self.at.get((place, layer), [])


class Builder:
    """What one rank does, pass by pass. Passes of the same rows are alike, and so are the names of what they start."""

    def __init__(self, run: Run, rank: int, device: Device) -> None:
        self.run, self.device, self.share = run, device, share(run, rank)
        self.pending: list[str] = []  # collectives that the update waits for
        self.buckets = Buckets(run, self.share)
        self.placed: dict[Pass, Placed] = {}
        self.known: dict[tuple[str, Pass], Instructions] = {}
        self.work = [self.seconds_of(part) for part in self.share.parts]

    def seconds_of(self, part: Part) -> Callable[[int], tuple[float, float]]:
        features, outputs = shape_of(part, self.run)
        return partial(seconds, self.device, features, outputs, self.run.problem.dtype)

    def of(self, one: Pass) -> Placed:
        """The collectives of a pass."""
        if one not in self.placed:
            self.placed[one] = placed_of(self.run, self.share, one)
        return self.placed[one]

    def start(self, axis: str, sent: Sent) -> Begin:
        size = sent.elements * BYTES[sent.dtype or self.run.problem.dtype]
        return Begin(f"{axis} {sent.detail}", axis, sent.op, size)

    def wait_for(self, found: list[tuple[str, Sent]]) -> Iterator[Instruction]:
        for axis, sent in found:
            begin = self.start(axis, sent)
            yield from (begin, End(begin.key))

    def forward(self, one: Pass) -> Instructions:
        """One forward pass through all layers of the rank."""
        if (known := self.known.get(("forward", one))) is not None:
            return known
        todo: Instructions = []
        placed = self.of(one)
        for part, work in zip(self.share.parts, self.work, strict=True):
            product, elementwise = work(one.rows)
            todo += self.wait_for(placed.get("before forward", part.layer))
            todo.append(Compute(product, "forward"))
            todo += self.wait_for(placed.get("after forward", part.layer))
            if elementwise:
                todo.append(Compute(elementwise, "forward"))
        self.known["forward", one] = todo
        return todo

    def backward(self, one: Pass, last: bool) -> Instructions:
        """One backward pass. last: whether it completes the gradients."""
        if not last and (known := self.known.get(("backward", one))) is not None:
            return known
        todo: Instructions = []
        placed = self.of(one)
        for i, (part, work) in reversed(list(enumerate(zip(self.share.parts, self.work, strict=True)))):
            product, elementwise = work(one.rows)
            if elementwise:
                todo.append(Compute(elementwise, "backward"))
            if last:
                todo += self.gradient(part.layer, "b", placed)
            todo.append(Compute((2 if i or one.input_grad else 1) * product, "backward"))
            if last:
                todo += self.gradient(part.layer, "w", placed)
            todo += self.wait_for(placed.get("after backward", part.layer))
        if not last:
            self.known["backward", one] = todo
        return todo

    def gradient(self, layer: int, name: str, placed: Placed) -> Iterator[Instruction]:
        """A gradient is complete: send the bucket that it fills; if its axis has no buckets, send it, and wait."""
        for axis, sent in placed.get("gradient", layer):
            if not sent.detail.startswith(f"gradient of {name}"):
                continue
            if axis == self.buckets.axis:
                for bucket in self.buckets.ready(f"{name}{layer}"):
                    begin = self.start(axis, bucket)
                    self.pending.append(begin.key)
                    yield begin
            else:
                yield from self.wait_for([(axis, sent)])

    def loss(self, found: Iterable[tuple[str, Sent]]) -> Iterator[Instruction]:
        """The scalar sums of the loss. In buckets, the loss is a part of the last one."""
        for axis, sent in found:
            if axis != self.buckets.axis:
                begin = self.start(axis, sent)
                self.pending.append(begin.key)
                yield begin

    def finish(self) -> Iterator[Instruction]:
        """Wait for everything that was sent, and update the parameters."""
        yield from map(End, self.pending)
        elements = sum(sum(self.share.elements(part)) for part in self.share.parts)
        yield Compute(update_bytes(self.run, elements) / self.device.memory_bandwidth, "update")
        if self.device.overhead:
            yield Compute(self.device.overhead, "overhead")


class Buckets:
    """The buckets of the one axis whose gradients are sent while the backward pass runs, and what has filled them."""

    def __init__(self, run: Run, mine: Share) -> None:
        replicas = [axis.name for axis in run.axes if axis.size > 1 and axis.name == "dp"]
        self.axis = replicas[0] if replicas and run.overlap and run.implementation == "torch" else None
        of_element = BYTES[run.problem.dtype]
        names, elements = [], []
        for part in reversed(mine.parts):
            of_w, of_b = mine.elements(part)
            names += [f"b{part.layer}", f"w{part.layer}"]
            elements += [of_b, of_w]
        groups = bucketed([n * of_element for n in elements])
        self.waiting = [{names[i] for i in group} for group in groups]
        self.elements = [sum(elements[i] for i in group) for group in groups]
        self.sent = 0

    def ready(self, name: str) -> Iterator[Sent]:
        """A gradient is complete: the buckets that can be sent now, in their order."""
        for group in self.waiting:
            group.discard(name)
        while self.sent < len(self.waiting) and not self.waiting[self.sent]:
            yield Sent("all_reduce", self.elements[self.sent], "backward", f"bucket {self.sent}")
            self.sent += 1


def shape_of(part: Part, run: Run) -> tuple[int, int]:
    """[in, out] of a layer's weight, as a rank holds it."""
    rows, columns = (len(range(*s.indices(run.problem.width))) for s in part.w)
    return rows, columns


def placed_of(run: Run, mine: Share, one: Pass) -> Placed:
    """When each collective of one pass starts. The innermost axis comes first."""
    placed = Placed()
    for axis in reversed(run.axes):
        if axis.size == 1 or axis.strategy == "pipeline_parallel":
            continue
        for sent in strategies.of(axis.strategy).communication(replace(mine, passes=(one,)), axis.size):
            placed.add(axis.name, sent)
    return placed


def step(run: Run, rank: int, device: Device, schedule: Schedule = ()) -> Instructions:
    """What `rank` does in a step. schedule: of a pipeline. Raises ValueError for what the planner does not know."""
    built = Builder(run, rank, device)
    axis = next((axis for axis in run.axes if axis.strategy == "pipeline_parallel" and axis.size > 1), None)
    if axis is not None:
        return [*pipeline(built, run.mesh.coordinates(rank)[axis.name], axis, schedule), *built.finish()]
    one = built.share.passes[0]
    loss = built.of(one).get("loss", -1)
    return [*built.forward(one), *built.loss(loss), *built.backward(one, last=True), *built.finish()]


def pipeline(built: Builder, stage: int, axis: Axis, schedule: Schedule) -> Iterator[Instruction]:
    """The actions of one stage, with the messages between stages and the collectives inside each pass."""
    todo, last = actions(schedule, stage), axis.size - 1
    size = BYTES[built.run.problem.dtype] * built.share.features
    forward_left = sum(action.kind == "forward" for action in todo)
    backward_left = len(todo) - forward_left

    def source(action: Action) -> int:
        return stage - 1 if action.kind == "forward" else stage + 1

    def target(action: Action) -> int:
        return stage + 1 if action.kind == "forward" else stage - 1

    def post(action: Action | None) -> Iterator[Instruction]:
        if action is not None and 0 <= source(action) <= last:
            yield Post(message(action, stage))

    yield from post(todo[0])
    for action, following in zip(todo, [*todo[1:], None], strict=True):
        if 0 <= source(action) <= last:
            yield Receive(message(action, stage))
        ahead = following is not None and source(following) != target(action)
        if ahead:
            yield from post(following)
        one = built.share.passes[action.microbatch]
        if action.kind == "forward":
            yield from built.forward(one)
            forward_left -= 1
        else:
            backward_left -= 1
            yield from built.backward(one, last=backward_left == 0)
        if 0 <= target(action) <= last:
            yield Send(message(action, target(action)), target(action), one.rows * size)
        if forward_left == 0 and action.kind == "forward":
            inside = built.of(one).get("loss", -1)
            yield from built.loss([*inside, (axis.name, built.share.loss())])
        if not ahead:
            yield from post(following)


def message(action: Action, stage: int) -> str:
    """The name of what an action needs before it can run on a stage."""
    return f"{action} of stage {stage}"
