"""Where another mesh becomes the fastest, over the rate of the links and over the batch, and what would help most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from contract.planner.predict import Prediction, seconds_of
from contract.planner.search import Asked, Candidate, candidates, fastest
from contract.strategy import Run
from shardiff.cost import Link
from shardiff.devices import Machine

# Of the rate of the links, and of the batch. A step's time is close to linear in the batch and in 1 / rate, and a line
# that is the lowest somewhere between two others is below the point where these cross. So three values are enough to
# find all winners between them.
FACTORS = (1 / 16, 1.0, 16.0)
BATCHES = (1 / 8, 1.0, 8.0)
NEAR = 1.005  # how far apart the ends of an interval are, at most, in which a crossover is found
MOST_EXACT = 24  # meshes that are rebuilt for another batch: those with the lowest bounds there


@dataclass(frozen=True)
class Crossing:
    """At this value, `after` becomes faster than `before`, as the value grows. seconds: of both, there."""

    at: float
    before: Run
    after: Run
    seconds: float


def with_rate(machine: Machine, level: str, bandwidth: float) -> Machine:
    """The same with other links. level: inside or between; on one host `inside` is all there is."""
    return replace(machine, network=machine.network.with_links(**{level: bandwidth}))


def slow_level(machine: Machine) -> str:
    """The links whose rate is varied: those between hosts where there are several."""
    return "between" if machine.network.hosts > 1 else "inside"


def over_links(
    found: Sequence[Candidate], machine: Machine, level: str | None = None, factors: Sequence[float] = FACTORS
) -> list[Crossing]:
    """Crossovers from the slowest rate to the fastest, in bytes/s of the links of one device or one host."""
    level = level or slow_level(machine)
    rate = getattr(machine.network, level).bandwidth

    def best(value: float) -> Prediction:
        return fastest(found, with_rate(machine, level, value), 1)[0]

    def of(run: Run, value: float) -> float:
        return seconds_of(run, with_rate(machine, level, value))

    return crossings([rate * factor for factor in factors], best, of)


def over_batch(
    found: Sequence[Candidate], machine: Machine, asked: Asked, factors: Sequence[float] = BATCHES
) -> list[Crossing]:
    """Crossovers from the smallest batch to the largest, in samples of a step."""

    def at(value: float) -> Asked:
        return replace(asked, problem=replace(asked.problem, batch=round(value)))

    def best(value: float) -> Prediction:
        kept = shortlist(found, machine, value / asked.problem.batch)
        those, _ = candidates(machine, at(value), kept)
        return fastest([one for one in those if one.needs <= machine.device.memory], machine, 1)[0]

    def of(run: Run, value: float) -> float:
        return seconds_of(replace(run, problem=at(value).problem), machine)

    values = [asked.problem.batch * factor for factor in factors]
    return [
        replace(one, at=round(one.at))
        for one in crossings([value for value in values if value >= 1 and can(best, value)], best, of)
    ]


def can(best: Callable[[float], Prediction], value: float) -> bool:
    """Whether any mesh works and fits there."""
    try:
        best(value)
    except (IndexError, ValueError):
        return False
    return True


def shortlist(found: Sequence[Candidate], machine: Machine, factor: float) -> set[tuple[object, ...]]:
    """(axes, microbatches, schedule) of the meshes with the lowest bounds if activations grow by a factor."""

    def bound(one: Candidate) -> float:
        return replace(one, first=one.first.scaled(factor)).rough(machine.network)

    return {key(one.run) for one in sorted(found, key=bound)[:MOST_EXACT]}


def crossings(
    values: Sequence[float], best: Callable[[float], Prediction], of: Callable[[Run, float], float]
) -> list[Crossing]:
    """Between these values, ascending. best: the fastest mesh at a value; of: the seconds of a mesh at a value."""
    winners = [(value, best(value).run) for value in values]
    found: list[Crossing] = []
    for (low, before), (high, after) in zip(winners, winners[1:], strict=False):
        found += between(low, before, high, after, best, of)
    return found


def between(
    low: float,
    before: Run,
    high: float,
    after: Run,
    best: Callable[[float], Prediction],
    of: Callable[[Run, float], float],
    depth: int = 5,
) -> list[Crossing]:
    """The crossovers of one interval, whose ends have these winners. A third mesh may win in the middle."""
    if same(before, after):
        return []
    first, last = low, high
    while high / low > NEAR:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if of(before, middle) <= of(after, middle) else (low, middle)
    at = (low * high) ** 0.5
    third = best(at)
    if depth and not (same(third.run, before) or same(third.run, after)):
        left = between(first, before, at, third.run, best, of, depth - 1)
        return [*left, *between(at, third.run, last, after, best, of, depth - 1)]
    return [Crossing(at, before, after, of(after, at))]


def same(a: Run, b: Run) -> bool:
    """Whether two runs differ in their problem alone."""
    return key(a) == key(b)


def key(run: Run) -> tuple[object, ...]:
    """What tells a run from others of the same problem."""
    return run.axes, run.microbatches, run.schedule


def sensitivity(best: Prediction, machine: Machine) -> Mapping[str, float]:
    """What is doubled (or halved, if it is a latency) -> seconds of a step of the same mesh.

    Twice the batch has its time divided by two, so that all of them compare with `best.seconds` for as many samples.
    """
    network, device, run = machine.network, machine.device, best.run

    def seconds(machine: Machine, run: Run = run) -> float:
        return seconds_of(run, machine)

    def quicker(link: Link) -> Link:
        return replace(link, latency=link.latency / 2)

    measured = {key: replace(one, latency=one.latency / 2) for key, one in network.measured.items()}
    prompt = replace(
        network,
        inside=quicker(network.inside),
        between=quicker(network.between),
        call=network.call / 2,
        measured=measured,
    )
    rates = {dtype: 2 * rate for dtype, rate in device.rates.items()}
    links = {"links inside a host": {"inside": 2 * network.inside.bandwidth}}
    if network.hosts > 1:
        links["links between hosts"] = {"between": 2 * network.between.bandwidth}
    found = {name: seconds(replace(machine, network=network.with_links(**rate))) for name, rate in links.items()}
    return found | {
        "latency": seconds(replace(machine, network=prompt)),
        "compute": seconds(replace(machine, device=replace(device, rates=rates))),
        "memory bandwidth": seconds(
            replace(machine, device=replace(device, memory_bandwidth=2 * device.memory_bandwidth))
        ),
        "batch": seconds(machine, replace(run, problem=replace(run.problem, batch=2 * run.problem.batch))) / 2,
    }
