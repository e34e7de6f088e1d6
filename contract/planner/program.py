"""What one rank does in one training step, as a list of instructions, in the order in which torch_impl does it.

It follows from what the contract says of every strategy: what a rank holds (`contract.layout`), what it sends
(`contract.strategies`), the buckets of its gradients (`contract.buckets`) and the pipeline's schedule
(`contract.schedule`). Of a collective it is only decided here when it starts, and who waits for it:

    input of a layer                before the layer's forward pass, which waits for it
    output of a layer               after its product, and the next layer waits for it
    gradient of a layer's input     after the layer's backward pass, and the one before waits for it
    gradient of a parameter         as soon as it is ready, in buckets, of which the last one has the loss as well; the
                                    update waits for all of them
    a layer that is stored in       while the layer before it computes, which is the next one in the backward pass; its
    shards                          gradient is scattered while the following one computes (`torch_impl/prefetch.py`).
                                    Layers that another strategy takes in pairs are both there before the first of them
                                    computes, and both gradients are scattered once the pair is through with its
                                    backward pass, one after the other.
                                    In a pipeline: all layers before the first pass, all gradients after the last one
    loss                            after the forward passes; the update waits for it

A bias's gradient is ready before its layer's products, a weight's after both of them, or after its own where a
schedule splits the backward pass. What a stage of a pipeline runs, sends and is ready to receive is that of
`contract.messages`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from contract import strategies
from contract.axes import Axis
from contract.layout import held_by, share, unit_of
from contract.messages import programs
from contract.planner.buckets import Buckets
from contract.planner.instructions import (
    Begin,
    Compute,
    End,
    Instruction,
    Instructions,
    Placed,
    Post,
    Receive,
    Send,
    message,
    placed_of,
    shape_of,
)
from contract.planner.work import seconds, update_bytes
from contract.problem import BYTES
from contract.share import Part, Pass, Sent
from contract.strategy import Run
from shardiff.devices import Device

Kind = tuple[int, int]  # of passes: their rows, and their first layer


class Builder:
    """What one rank does, pass by pass. Passes of the same rows are alike, and so are the names of what they start."""

    def __init__(self, run: Run, rank: int, device: Device) -> None:
        self.run, self.rank, self.device, self.share = run, rank, device, share(run, rank)
        self.pending: list[str] = []  # collectives that the update waits for
        pipeline = run.size("pipeline_parallel") > 1
        gathers = any(axis.size > 1 and strategies.gathers(axis.strategy) for axis in run.axes)
        whole = "zero2" in run.strategies  # its layers are, and their gradients are scattered
        self.ahead = gathers and run.overlap and not pipeline  # layers are gathered while the one before computes
        self.beside = self.ahead or (whole and run.overlap and not pipeline)  # gradients are scattered meanwhile
        self.at_once = self.beside and not self.ahead  # as soon as the layer has both of them
        self.at_the_end = pipeline or (whole and not self.beside)  # all of them
        self.unit = unit_of(run)  # layers that are taken together
        self.buckets = Buckets(run, self.share, self.beside or whole)
        self.scattering: tuple[int, list[str]] | None = None  # the layer whose gradients are being scattered
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
        placed, parts = self.of(one), self.share.parts_of(one)
        for i, part in enumerate(parts):
            product, elementwise = self.work[part.layer](one.rows)
            if not self.at_the_end and i % self.unit == 0:
                for j in range(i, min(i + self.unit, len(parts))):
                    todo += self.gathered("gather", placed, [each.layer for each in parts[j : j + 2]], j == 0)
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
            if of_input and not self.at_the_end and part.layer:  # layer 0 needs no dX, and so not its w
                layers = [each.layer for each in parts[max(i - 1, 1) : i + 1][::-1]]
                todo += self.gathered("gather again", placed, layers, i == len(parts) - 1)
            if complete:
                todo += self.gradient(part.layer, "b", placed)
            products = (kind != "backward_input") + (of_input and bool(i or one.input_grad))
            if products:
                todo.append(Compute(products * product, "backward"))
            if complete:
                todo += self.gradient(part.layer, "w", placed)
                todo += self.scatter(part.layer, placed) if self.at_once else ()
            if of_input:
                todo += self.wait_for(placed.get("after backward", part.layer))
            if complete and not (self.at_once or self.at_the_end) and i % self.unit == 0:
                for each in reversed(parts[i : i + self.unit]):
                    todo += self.scatter(each.layer, placed)
        if not complete:
            self.known[kind, self.alike(one)] = todo
        return todo

    def gradient(self, layer: int, name: str, placed: Placed) -> Iterator[Instruction]:
        """A gradient is complete: send the bucket that it fills; if its axis has no buckets, send it, and wait."""
        if self.beside or (self.at_the_end and placed.get("scatter", layer)):
            return  # only shards are summed, after they are scattered
        yield from self.summed(layer, name, placed)

    def summed(self, layer: int, name: str, placed: Placed) -> Iterator[Instruction]:
        """The sum of a gradient over the replicas."""
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

    def gathered(self, place: str, placed: Placed, layers: list[int], first: bool) -> Iterator[Instruction]:
        """The first of these layers is gathered, and the gathering of the second has started."""
        now, following = placed.get(place, layers[0]), layers[1:]
        if not self.ahead:
            yield from self.wait_for(now)
            return
        if first:
            yield from (self.start(*each) for each in now)
        for layer in following:
            yield from (self.start(*each) for each in placed.get(place, layer))
        yield from (End(self.start(*each).key) for each in now)

    def scatter(self, layer: int, placed: Placed) -> Iterator[Instruction]:
        """The gradients of a layer are complete: they are scattered, and those of the layer before are whole sums."""
        if not self.beside:
            yield from self.wait_for(placed.get("scatter", layer))
            return
        yield from self.scattered(placed)
        begun = [self.start(*each) for each in placed.get("scatter", layer)]
        self.scattering = layer, [one.key for one in begun]
        yield from begun

    def scattered(self, placed: Placed) -> Iterator[Instruction]:
        """Wait for what is being scattered, and start its sum over the replicas."""
        if self.scattering is None:
            return
        (layer, keys), self.scattering = self.scattering, None
        yield from map(End, keys)
        for axis in dict.fromkeys(axis for axis, _ in placed.get("gradient", layer)):
            elements = sum(sent.elements for of, sent in placed.get("gradient", layer) if of == axis)
            begin = self.start(axis, Sent("all_reduce", elements, "backward", f"gradients of layer {layer}"))
            self.pending.append(begin.key)
            yield begin

    def gathered_at_first(self) -> Iterator[Instruction]:
        """In a pipeline all layers are gathered before the first pass."""
        placed = self.of(self.share.passes[0])
        for part in self.share.parts:
            yield from self.wait_for(placed.get("gather", part.layer))

    def scattered_at_last(self, placed: Placed) -> Iterator[Instruction]:
        """What is scattered after the last pass."""
        yield from self.scattered(placed)
        for part in reversed(self.share.parts) if self.at_the_end else ():
            if placed.get("scatter", part.layer):
                yield from self.wait_for(placed.get("scatter", part.layer))
                for name in "bw":
                    yield from self.summed(part.layer, name, placed)

    def gathered_updated(self, placed: Placed) -> Iterator[Instruction]:
        """What each rank has updated: in one call where torch_impl gathers in place, all at once otherwise."""
        found = [each for part in self.share.parts for each in placed.get("gather updated", part.layer)]
        if self.run.implementation == "torch" and self.run.device == "cpu" and self.run.overlap and found:
            elements = sum(sent.elements for _, sent in found)
            yield from self.wait_for([(found[0][0], Sent("all_gather", elements, "update", "updated parameters"))])
            return
        begun = [self.start(*each) for each in found]
        yield from begun
        yield from (End(one.key) for one in begun)

    def loss(self, found: Iterable[tuple[str, Sent]]) -> Iterator[Instruction]:
        """The scalar sums of the loss. In buckets, the loss is a part of the last one."""
        for axis, sent in found:
            if axis != self.buckets.axis:
                begin = self.start(axis, sent)
                self.pending.append(begin.key)
                yield begin

    def finish(self) -> Iterator[Instruction]:
        """Wait for everything that was sent, and update what this rank updates of the parameters."""
        placed = self.of(self.share.passes[0])
        yield from self.scattered_at_last(placed)
        yield from map(End, self.pending)
        updated = held_by(self.run, self.rank, "optimizer_state")
        elements = sum(sum(self.share.elements(part)) for part in updated)
        yield Compute(update_bytes(self.run, elements) / self.device.memory_bandwidth, "update")
        yield from self.gathered_updated(placed)
        if self.device.overhead:
            yield Compute(self.device.overhead, "overhead")


def step(run: Run, rank: int, device: Device) -> Instructions:
    """What `rank` does in a step. Raises ValueError for what the planner does not know."""
    built = Builder(run, rank, device)
    axis = next((axis for axis in run.axes if axis.strategy == "pipeline_parallel" and axis.size > 1), None)
    if axis is not None:
        stage = run.mesh.coordinates(rank)[axis.name]
        return [*built.gathered_at_first(), *pipeline(built, stage, axis), *built.finish()]
    one = built.share.passes[0]
    loss = built.of(one).get("loss")
    return [*built.forward(one), *built.loss(loss), *built.backward(one), *built.finish()]


def pipeline(built: Builder, stage: int, axis: Axis) -> Iterator[Instruction]:
    """The program of one stage, with the collectives inside each pass."""
    schedule, m = built.share.schedule, built.run.microbatches
    assert schedule is not None
    size = BYTES[built.run.problem.dtype] * built.share.features
    left = Counter(action.chunk for action in schedule.orders[stage] if action.kind in COMPLETING)
    for op, action in programs(schedule)[stage]:
        if action is None:
            inside = built.of(built.share.passes[0]).get("loss")
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
