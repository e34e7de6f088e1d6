"""A lower bound of a step's time, in a fraction of the simulation's own time, so that few meshes are simulated.

Passes take what they compute and what they wait for at once, on links that nothing else uses; messages and buckets
are on links of their own. The schedule is replayed with these times. What the event simulation adds is sharing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from contract.layout import unit_of
from contract.planner.places import Placement
from contract.planner.program import Begin, Builder, Compute, End, Instructions
from contract.planner.timetable import Timetable, replay
from contract.problem import BYTES
from contract.schedule import Schedule
from contract.strategy import Run
from shardiff.cost import Group, Network
from shardiff.devices import Machine

Started = Counter[tuple[str, str, int]]  # (axis, op, payload) -> how often


@dataclass(frozen=True)
class Lump:
    """What is done one after the other. seconds: computed; waited: collectives that the rank waits for at once;
    beside: those that run while it goes on."""

    seconds: float
    waited: Started
    beside: Started

    def alone(self, groups: Mapping[str, Group], network: Network) -> float:
        """Seconds on links that nothing else uses."""
        return self.seconds + lasting(self.waited, groups, network)


    def scaled(self, factor: float) -> Lump:
        """With another number of rows, if all of it is about activations."""
        waited = Started({(axis, op, round(size * factor)): n for (axis, op, size), n in self.waited.items()})
        return Lump(self.seconds * factor, waited, self.beside)


def lump(todo: Instructions) -> Lump:
    """The sum of instructions."""
    seconds, waited, beside = 0.0, Started(), Started()
    for one, following in zip(todo, [*todo[1:], None], strict=True):
        if isinstance(one, Compute):
            seconds += one.seconds
        elif isinstance(one, Begin):
            at_once = isinstance(following, End) and following.key == one.key
            (waited if at_once else beside)[one.axis, one.op, one.payload] += 1
    return Lump(seconds, waited, beside)


def lasting(started: Started, groups: Mapping[str, Group], network: Network) -> float:
    """Seconds of these collectives, one after the other; a burst passes at once."""
    burst = min(network.inside.burst, network.between.burst)
    return sum(
        times * (network.seconds(op, payload, groups[axis]) - burst / network.bandwidth(groups[axis]))
        for (axis, op, payload), times in started.items()
    )


@dataclass(frozen=True)
class Stage:
    """What one stage does: a forward pass, a backward pass, the last backward pass, and the end of the step. message:
    bytes that it sends to the next one."""

    forward: Lump
    backward: Lump
    last: Lump
    update: Lump
    message: int

    def scaled(self, factor: float) -> Stage:
        """With another number of rows, about: gradients stay, activations grow."""
        forward, backward, last = (one.scaled(factor) for one in (self.forward, self.backward, self.last))
        return Stage(forward, backward, last, self.update, round(self.message * factor))


def stage_of(run: Run, rank: int, machine: Machine) -> Stage:
    """Of the first microbatch's rows, which are the most."""
    built = Builder(run, rank, machine.device)
    one = built.share.passes[0]
    forward, backward = lump(built.forward(one)), lump(built.backward(one, last=False))
    last = lump(built.backward(one, last=True))
    built.pending.clear()
    message = one.rows * built.share.features * BYTES[run.problem.dtype]
    return Stage(forward, backward, last, lump(list(built.finish())), message)


def stages_of(run: Run, machine: Machine, ranks: tuple[int, ...]) -> list[Stage]:
    """All stages of a run. Those in the middle with as many layers are alike."""
    made: dict[tuple[int, bool, bool], Stage] = {}
    found = []
    blocks = run.problem.layers // unit_of(run)
    for index, rank in enumerate(ranks):
        size, more = divmod(blocks, len(ranks))
        key = (size + (index < more), index == 0, index == len(ranks) - 1)
        if key not in made:
            made[key] = stage_of(run, rank, machine)
        found.append(made[key])
    return found


def rough(run: Run, one: Stage, placed: Placement, network: Network, table: Timetable) -> float:
    """Seconds that a step takes at least, from the first stage alone.

    In a pipeline, no stage is faster than the first one would be with the layers of the smallest; so as much time
    passes as the longest chain of passes and messages of such stages takes. The chain is taken to pass all boundaries
    between stages equally often.
    """
    groups = placed.places[0].groups
    forward, backward = one.forward.alone(groups, network), one.backward.alone(groups, network)
    beside = max(one.last.alone(groups, network), lasting(one.last.beside, groups, network))
    stages = run.size("pipeline_parallel")
    if stages == 1:
        return forward + beside + one.update.seconds
    blocks = run.problem.layers // unit_of(run)
    smallest = (blocks // stages) / -(-blocks // stages)
    chain = table.chain
    messages = messages_of([one] * (stages - 1), placed, network)
    message = sum(map(sum, messages)) / len(messages)
    through = smallest * (chain.forward * forward + chain.backward * backward) + chain.messages * message
    work = run.microbatches * (forward + backward)
    return max(through, work) - backward + max(backward, beside) + one.update.seconds


def messages_of(stages: list[Stage], placed: Placement, network: Network) -> list[tuple[float, float]]:
    """For each boundary between stages: the seconds that a message takes on the link, and its latency."""
    burst, found = min(network.inside.burst, network.between.burst), []
    for one, here, there in zip(stages, placed.places, placed.places[1:], strict=False):
        pair = Group(2, 1 + (here.host != there.host), max(1, round(here.many)))
        size = max(0.0, network.wire("collective_permute", one.message, pair) - burst)
        found.append((size / network.bandwidth(pair), network.latency("collective_permute", pair)))
    return found


@dataclass(frozen=True)
class Replay:
    """A step whose passes take what they take alone. last: the stage that is done last, whose seconds the others are:
    idle: waiting for other stages; bubble: that, if messages took no time; beside: what its buckets take after its last
    pass; sending: what its messages take."""

    seconds: float
    last: int
    idle: float
    bubble: float
    beside: float
    sending: float


def replayed(
    run: Run, stages: list[Stage], placed: Placement, network: Network, schedule: Schedule, stage: int | None = None, bubble: bool = True
) -> Replay:
    """One step of a pipeline. stage: the one to tell of, if not the last one. bubble: whether it is asked for.

    Messages have the links between two stages to themselves, one after the other.
    """
    groups = placed.places[0].groups
    alone = {id(one): (one.forward.alone(groups, network), one.backward.alone(groups, network)) for one in stages}
    forward, backward = ([alone[id(one)][i] for one in stages] for i in (0, 1))
    messages = messages_of(stages, placed, network)
    idle = replay(schedule, forward, backward, messages)
    beside = [
        max(0.0, lasting(one.last.beside, groups, network) - backward[i], one.last.alone(groups, network) - backward[i])
        for i, one in enumerate(stages)
    ]
    ends = [
        idle[i] + run.microbatches * (forward[i] + backward[i]) + beside[i] + one.update.seconds
        for i, one in enumerate(stages)
    ]
    last = max(range(len(stages)), key=lambda i: ends[i]) if stage is None else stage
    free = replay(schedule, forward, backward, [(0.0, 0.0)] * len(messages)) if bubble else idle
    sending = run.microbatches * sum(sum(messages[b]) for b in (last - 1, last) if 0 <= b < len(messages))
    return Replay(ends[last], last, idle[last], min(free[last], idle[last]), beside[last], sending)
