"""What a step takes at least, in a fraction of the simulation's own time, so that few meshes are simulated.

Passes take what they compute and what they wait for at once, on links that nothing else uses; messages and buckets
are on links of their own. The schedule is replayed with these times. What the event simulation adds is sharing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from contract.layout import unit_of
from contract.planner.instructions import Begin, Compute, End, Instructions
from contract.planner.places import Placement
from contract.planner.program import COMPLETING, Builder
from contract.planner.timetable import Timetable, What, replay, timetable
from contract.problem import BYTES, split_sizes
from contract.strategy import Run
from shardiff.cost import Group, Network
from shardiff.devices import Machine

Started = Counter[tuple[str, str, int]]  # (axis, op, payload) -> how often
Groups = Mapping[str, Group]


@dataclass(frozen=True)
class Lump:
    """What is done one after the other. seconds: computed; waited: collectives that the rank waits for at once;
    beside: those that run while it goes on."""

    seconds: float
    waited: Started
    beside: Started

    def alone(self, groups: Groups, network: Network) -> float:
        """Seconds on links that nothing else uses, if all that runs beside begins and ends in it."""
        return max(self.seconds + lasting(self.waited, groups, network), longest(self.beside, groups, network))

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


def lasting(started: Started, groups: Groups, network: Network) -> float:
    """Seconds of these collectives, one after the other; a burst passes at once."""
    burst = min(network.inside.burst, network.between.burst)
    return sum(
        times * (network.seconds(op, payload, groups[axis]) - burst / network.bandwidth(groups[axis]))
        for (axis, op, payload), times in started.items()
    )


def longest(started: Started, groups: Groups, network: Network) -> float:
    """Seconds of the axis whose collectives take longest: those of different axes may run at the same time."""
    axes = {axis for axis, _, _ in started}
    return max(
        (lasting(Started({k: n for k, n in started.items() if k[0] == axis}), groups, network) for axis in axes),
        default=0.0,
    )


@dataclass(frozen=True)
class Stage:
    """What one stage does. passes: each pass. gradients: the collectives of the gradients, which the last passes start.
    once: those of a step that are in no pass, and the update. message: bytes of a result that goes to another stage."""

    passes: Mapping[What, Lump]
    gradients: Lump
    once: Lump
    message: int

    def times(self, groups: Groups, network: Network) -> dict[What, float]:
        """Seconds of each pass alone."""
        return {what: one.alone(groups, network) for what, one in self.passes.items()}

    def after(self, times: Mapping[What, float], groups: Groups, network: Network) -> float:
        """Seconds that the gradients take at least after the last backward pass has begun, or as long as it takes.

        times: of each pass alone."""
        last = max(seconds for (_, kind), seconds in times.items() if kind in COMPLETING)
        beside = longest(self.gradients.beside, groups, network)
        return max(last + lasting(self.gradients.waited, groups, network), beside) - last

    def outside(self, groups: Groups, network: Network) -> float:
        """Seconds of the update, and of what is in no pass."""
        return self.once.seconds + max(
            lasting(self.once.waited, groups, network), longest(self.once.beside, groups, network)
        )

    def scaled(self, factor: float) -> Stage:
        """With another number of rows, about: gradients stay, activations grow."""
        passes = {what: one.scaled(factor) for what, one in self.passes.items()}
        return replace(self, passes=passes, message=round(self.message * factor))


def stage_of(run: Run, rank: int, machine: Machine, number: int = 0) -> Stage:
    """What `rank` does on stage `number`, for the rows of the first microbatch, which are the most."""
    built, passes, table = Builder(run, rank, machine.device), {}, timetable(run)
    wanted = table.counts[number] if table.counts else {(0, "forward"): 1, (0, "backward"): 1}
    gradients = Lump(0.0, Started(), Started())
    each = run.microbatches if table.counts else 1
    for chunk, kind in wanted:
        one = built.share.passes[chunk * each]
        if kind == "forward":
            passes[chunk, kind] = lump(built.forward(one))
        else:
            passes[chunk, kind] = usual = lump(built.backward(one, kind, last=False))
            if kind in COMPLETING:
                last = lump(built.backward(one, kind, last=True))
                waited, beside = last.waited - usual.waited, last.beside
                gradients = Lump(0.0, gradients.waited + waited, gradients.beside + beside)
    once = lump([*(built.gathered_at_first() if table.counts else ()), *built.finish()])
    message = built.share.passes[0].rows * built.share.features * BYTES[run.problem.dtype]
    return Stage(passes, gradients, once, message)


def stages_of(run: Run, machine: Machine, ranks: Sequence[int]) -> list[Stage]:
    """All stages of a run. Those in the middle with as many layers are alike."""
    table = timetable(run)
    sizes, last = split_sizes(run.problem.layers // unit_of(run), table.parts), table.parts - 1
    made: dict[tuple[object, ...], Stage] = {}
    found = []
    for number, rank in enumerate(ranks):
        parts = table.held[number]
        key = (*(sizes[part] for part in parts), 0 in parts, last in parts)
        if key not in made:
            made[key] = stage_of(run, rank, machine, number)
        found.append(made[key])
    return found


def rough(run: Run, one: Stage, placed: Placement, network: Network) -> float:
    """Seconds that a step takes at least, from the first stage alone.

    In a pipeline, no stage is faster than the first one would be with the layers of the smallest; so as much time
    passes as the longest chain of passes and messages of such stages takes. The chain is taken to pass all links
    between stages equally often.
    """
    groups, table = placed.places[0].groups, timetable(run)
    times = one.times(groups, network)
    after = one.after(times, groups, network) + one.outside(groups, network)
    if table.chain is None:
        return sum(times.values()) + after
    blocks, pieces = run.problem.layers // unit_of(run), table.parts
    smallest = (blocks // pieces) / -(-blocks // pieces)
    messages = messages_of(one.message, placed, network, table)
    message = sum(map(sum, messages)) / len(messages)
    through = sum(n * smallest * times[what] for what, n in table.chain.items()) + table.messages * message
    return max(through, sum(n * times[what] for what, n in table.counts[0].items())) + after


def messages_of(size: float, placed: Placement, network: Network, table: Timetable) -> list[tuple[float, float]]:
    """For each link between stages: the seconds that a message takes on it, and its latency."""
    burst, known = min(network.inside.burst, network.between.burst), {}
    many, hosts = max(1, round(placed.places[0].many)), [place.host for place in placed.places]
    for across in (False, True):
        pair = Group(2, 1 + across, many)
        wire = max(0.0, network.wire("collective_permute", size, pair) - burst)
        known[across] = wire / network.bandwidth(pair), network.latency("collective_permute", pair)
    return [known[hosts[source] != hosts[target]] for source, target in table.links]


@dataclass(frozen=True)
class Replay:
    """A step whose passes take what they take alone. last: the stage that is done last, whose seconds the others are:
    idle: waiting for other stages; bubble: that, if messages took no time; after: what its gradients take after its
    last pass; sending: what its messages take."""

    seconds: float
    last: int
    idle: float
    bubble: float
    after: float
    sending: float


def replayed(
    run: Run,
    stages: Sequence[Stage],
    placed: Placement,
    network: Network,
    stage: int | None = None,
    with_bubble: bool = True,
) -> Replay:
    """One step of a pipeline. stage: the one to tell of, if not the last one. with_bubble: whether it is asked for.

    Messages have the links between two stages to themselves, one after the other.
    """
    groups, table = placed.places[0].groups, timetable(run)
    alike = {id(one): one for one in stages}
    known = {key: one.times(groups, network) for key, one in alike.items()}
    times = [known[id(one)] for one in stages]
    messages = messages_of(stages[0].message, placed, network, table)
    passed = replay(table, times, messages)
    afters = {key: one.after(known[key], groups, network) for key, one in alike.items()}
    after = [afters[id(one)] for one in stages]
    outside = {key: one.outside(groups, network) for key, one in alike.items()}
    ends = [passed[i] + after[i] + outside[id(one)] for i, one in enumerate(stages)]
    last = max(range(len(stages)), key=lambda i: ends[i]) if stage is None else stage
    work = sum(n * times[last][what] for what, n in table.counts[last].items())
    idle = passed[last] - work
    free = replay(table, times, [(0.0, 0.0)] * len(messages))[last] - work if with_bubble else idle
    sending = run.microbatches * sum(
        sum(time) for time, (source, _) in zip(messages, table.links, strict=True) if source == last
    )
    return Replay(ends[last], last, idle, min(free, idle), after[last], sending)
