"""What one rank does in one training step, as a list of instructions, in the order in which torch_impl does it.

It follows from what the contract says of every strategy: what a rank holds (`contract.layout`), what it sends
(`contract.strategies`), the buckets of its gradients (`contract.buckets`) and the pipeline's schedule
(`contract.schedule`). Of a collective it is only decided here when it starts, and who waits for it:

    input of a layer                before the layer's forward pass, which waits for it
    output of a layer               after its product, and the next layer waits for it
    gradient of a layer's input     after the layer's backward pass, and the one before waits for it
    gradient of a parameter         as soon as it is ready, in buckets; the update waits for all of them
    loss                            after the forward passes; the update waits for it

A bias's gradient is ready before its layer's products, a weight's after both of them, or after its own where a
schedule splits the backward pass. What a stage of a pipeline runs, sends and is ready to receive is that of
`contract.messages`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from contract import strategies
from contract.buckets import bucketed
from contract.layout import share
from contract.messages import programs
from contract.planner.work import seconds, update_bytes
from contract.problem import BYTES
from contract.schedule import Action
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
Kind = tuple[int, int]  # of passes: their rows, and their first layer


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
        self.placed: dict[Kind, Placed] = {}
        self.known: dict[tuple[str, Kind], Instructions] = {}
        self.work = {part.layer: self.seconds_of(part) for part in self.share.parts}

    def seconds_of(self, part: Part) -> Callable[[int], tuple[float, float]]:
        features, outputs = shape_of(part, self.run)
        return partial(seconds, self.device, features, outputs, self.run.problem.dtype)

    def of(self, one: Pass) -> Placed:
        """The collectives of a pass."""
        kind = self.alike(one)
        if kind not in self.placed:
            self.placed[kind] = placed_of(self.run, self.share, one)
        return self.placed[kind]

    def alike(self, one: Pass) -> Kind:
        """What passes have in common that are alike: their rows, and their first layer."""
        return one.rows, self.share.parts_of(one)[0].layer

    def start(self, axis: str, sent: Sent) -> Begin:
        size = sent.elements * BYTES[sent.dtype or self.run.problem.dtype]
        return Begin(f"{axis} {sent.detail}", axis, sent.op, size)

    def wait_for(self, found: list[tuple[str, Sent]]) -> Iterator[Instruction]:
        for axis, sent in found:
            begin = self.start(axis, sent)
            yield from (begin, End(begin.key))

    def forward(self, one: Pass) -> Instructions:
        """One forward pass through the layers of a pass."""
        if (known := self.known.get(("forward", self.alike(one)))) is not None:
            return known
        todo: Instructions = []
        placed = self.of(one)
        for part in self.share.parts_of(one):
            product, elementwise = self.work[part.layer](one.rows)
            todo += self.wait_for(placed.get("before forward", part.layer))
            todo.append(Compute(product, "forward"))
            todo += self.wait_for(placed.get("after forward", part.layer))
            if elementwise:
                todo.append(Compute(elementwise, "forward"))
        self.known["forward", self.alike(one)] = todo
        return todo

    def backward(self, one: Pass, kind: str = "backward", last: bool = True) -> Instructions:
        """One backward pass. kind: "backward", or the half of it that a schedule splits off: "backward_input" or
        "backward_weight". last: whether it completes the gradients of its layers."""
        complete = last and kind != "backward_input"
        if not complete and (known := self.known.get((kind, self.alike(one)))) is not None:
            return known
        todo: Instructions = []
        placed, parts = self.of(one), self.share.parts_of(one)
        for i, part in reversed(list(enumerate(parts))):
            product, elementwise = self.work[part.layer](one.rows)
            of_input = kind != "backward_weight"
            if elementwise and of_input:
                todo.append(Compute(elementwise, "backward"))
            if complete:
                todo += self.gradient(part.layer, "b", placed)
            products = (kind != "backward_input") + (of_input and bool(i or one.input_grad))
            if products:
                todo.append(Compute(products * product, "backward"))
            if complete:
                todo += self.gradient(part.layer, "w", placed)
            if of_input:
                todo += self.wait_for(placed.get("after backward", part.layer))
        if not complete:
            self.known[kind, self.alike(one)] = todo
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


def step(run: Run, rank: int, device: Device) -> Instructions:
    """What `rank` does in a step. Raises ValueError for what the planner does not know."""
    built = Builder(run, rank, device)
    axis = next((axis for axis in run.axes if axis.strategy == "pipeline_parallel" and axis.size > 1), None)
    if axis is not None:
        return [*pipeline(built, run.mesh.coordinates(rank)[axis.name], axis), *built.finish()]
    one = built.share.passes[0]
    loss = built.of(one).get("loss", -1)
    return [*built.forward(one), *built.loss(loss), *built.backward(one), *built.finish()]


def pipeline(built: Builder, stage: int, axis: Axis) -> Iterator[Instruction]:
    """The program of one stage, with the collectives inside each pass."""
    schedule, m = built.share.schedule, built.run.microbatches
    assert schedule is not None
    size = BYTES[built.run.problem.dtype] * built.share.features
    left = Counter(action.chunk for action in schedule.orders[stage] if action.kind in COMPLETING)
    for op, action in programs(schedule)[stage]:
        if action is None:
            inside = built.of(built.share.passes[0]).get("loss", -1)
            yield from built.loss([*inside, (axis.name, built.share.loss())])
            continue
        one = built.share.passes[action.chunk * m + action.microbatch]
        if op == "receive":
            yield Post(message(action))
        elif op == "send":
            target = schedule.target(action)
            assert target is not None
            yield Send(message(action), target.stage, one.rows * size)
        else:
            source = schedule.source(action)
            if source is not None and source.stage != stage:
                yield Receive(message(source))
            left[action.chunk] -= action.kind in COMPLETING
            last = action.kind in COMPLETING and left[action.chunk] == 0
            yield from built.forward(one) if action.kind == "forward" else built.backward(one, action.kind, last)


COMPLETING = ("backward", "backward_weight")  # the passes that add to the gradients of the weights


def message(action: Action) -> str:
    """The name of an action's result."""
    return f"{action} of stage {action.stage}"
