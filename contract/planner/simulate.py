"""An event simulation of one training step: ranks that compute, wait and send, on links that they share.

Ranks that do the same at the same time are simulated as one: without a pipeline a single rank stands for all, and with
one a rank of each stage. (The ranks with the most rows and parameters are taken, so the step is that of the busiest.)
A rank stands for all groups of its kind on its host when it comes to what these share. Or every rank is simulated: then
a collective begins once all ranks of its group have begun it.

`contract.planner.links` has what is on its way. A message moves once it is sent and its receiver is ready for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from contract.planner.instructions import Begin, Compute, End, Instructions, Receive, Send
from contract.planner.links import Clock, Traffic, Transfer
from contract.planner.places import Place
from shardiff.cost import Group, Network

Key = tuple[int, str]  # what a rank waits for: its collective, or a message to it


@dataclass
class Rank:
    """How far a simulated rank is. started: axis -> how many collectives it has begun along it. waits: what for ->
    seconds; spent: what is computed -> seconds."""

    todo: Instructions
    place: Place
    next: int = 0
    time: float = 0.0
    started: dict[str, int] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """seconds: until the last rank is done. Of each rank: when it is done, what it computed and what it waited for,
    by axis; messages of a pipeline are the axis `pp`."""

    seconds: float
    ends: tuple[float, ...]
    spent: tuple[Mapping[str, float], ...]
    waits: tuple[Mapping[str, float], ...]


class Stuck(RuntimeError):
    """The ranks wait for one another forever."""


def simulate(
    programs: Sequence[Instructions],
    places: Sequence[Place],
    network: Network,
    stages: str = "pp",
) -> Outcome:
    """Run all programs. stages: the axis of the pipeline, whose collectives join all simulated ranks.

    Raises Stuck if a rank waits for something that never happens.
    """
    ranks = [Rank(todo, place) for todo, place in zip(programs, places, strict=True)]
    return Simulation(ranks, network, stages).run()


class Simulation:
    """The state of `simulate`: what is on its way, and who waits for what."""

    def __init__(self, ranks: list[Rank], network: Network, stages: str) -> None:
        self.ranks, self.network, self.stages = ranks, network, stages
        self.clock = Clock()
        self.traffic = Traffic(self.clock, network)
        self.done: set[Key] = set()
        self.waiting: set[Key] = set()
        self.sent: dict[Key, Transfer] = {}  # messages whose receiver is not ready
        self.expected: set[Key] = set()  # messages that are not sent yet
        self.begun: dict[tuple[str, int, int], list[Key]] = {}  # collectives that some ranks have begun

    def run(self) -> Outcome:
        for index in range(len(self.ranks)):
            self.advance(index, 0.0)
        self.clock.run()
        for index, rank in enumerate(self.ranks):
            if rank.next < len(rank.todo):
                raise Stuck(f"rank {index} waits forever for {rank.todo[rank.next]}")
        ends = tuple(rank.time for rank in self.ranks)
        return Outcome(max(ends), ends, tuple(r.spent for r in self.ranks), tuple(r.waits for r in self.ranks))

    def advance(self, index: int, time: float) -> None:
        """Let a rank go on until it computes or has to wait."""
        rank = self.ranks[index]
        rank.time, todo, many = time, rank.todo, len(rank.todo)
        while rank.next < many:
            now = todo[rank.next]
            if isinstance(now, Compute):
                rank.next += 1
                rank.spent[now.what] = rank.spent.get(now.what, 0.0) + now.seconds
                self.clock.at(time + now.seconds, partial(self.advance, index))
                return
            if isinstance(now, End | Receive):
                if (index, now.key) not in self.done:
                    self.waiting.add((index, now.key))
                    return
                self.done.remove((index, now.key))  # the next pass has collectives of the same names
            elif isinstance(now, Begin):
                self.begin(index, rank, now)
            elif isinstance(now, Send):
                self.send(index, rank, now)
            elif (message := self.sent.pop((index, now.key), None)) is not None:
                self.traffic.enqueue(message, time)
            else:
                self.expected.add((index, now.key))
            rank.next += 1

    def peers(self, index: int, place: Place, axis: str) -> Sequence[int]:
        """The simulated ranks of a rank's group along an axis."""
        return place.peers.get(axis) or (range(len(self.ranks)) if axis == self.stages else (index,))

    def begin(self, index: int, rank: Rank, one: Begin) -> None:
        """Begin a collective, which starts with the last of its ranks."""
        peers = self.peers(index, rank.place, one.axis)
        number = rank.started[one.axis] = rank.started.get(one.axis, 0) + 1
        line = (one.axis, peers[0])
        keys = self.begun.setdefault((*line, number), [])
        keys.append((index, one.key))
        if len(keys) < len(peers):
            return
        del self.begun[*line, number]
        network, group = self.network, rank.place.groups[one.axis]
        arrived = partial(self.all_arrived, keys, one.axis)
        if one.axis == self.stages:  # a scalar: it is there as soon as all stages have begun it
            self.clock.at(rank.time + network.latency(one.op, group), arrived)
            return
        parts = [(self.traffic.link(way, peer), 1.0) for peer in peers for way in ("out", "in")]
        most = float("inf")
        if group.hosts > 1:
            hosts = [self.ranks[peer].place.host for peer in peers]
            for host in dict.fromkeys(hosts):  # a ring leaves a host once
                flows = hosts.count(host) * rank.place.many / group.per_host
                parts += [(self.traffic.link(way, host), flows) for way in ("up", "down")]
            most = network.limit(group)
        size, lag = network.moved(one.op, one.payload, group)
        latency, rounds = network.latency(one.op, group), network.rounds(one.op, group)
        self.traffic.enqueue(Transfer(size, parts, most, latency, arrived, line, rounds, lag), rank.time)

    def send(self, index: int, rank: Rank, one: Send) -> None:
        """A message moves when both its sender and its receiver are ready."""
        target = self.peers(index, rank.place, self.stages)[one.to]
        to, key = self.ranks[target].place, (target, one.key)
        parts, most = [(self.traffic.link("out", index), 1.0), (self.traffic.link("in", target), 1.0)], float("inf")
        pair = Group(2, 1 + (to.host != rank.place.host))
        if pair.hosts > 1:
            parts += [(self.traffic.link("up", rank.place.host), rank.place.many)]
            parts += [(self.traffic.link("down", to.host), to.many)]
            most = self.network.limit(pair)
        latency = self.network.latency("collective_permute", pair)
        size = self.network.wire("collective_permute", one.size, pair)
        arrived = partial(self.all_arrived, [key], self.stages)
        message = Transfer(size, parts, most, latency, arrived, (index, target))
        if key in self.expected:
            self.expected.remove(key)
            self.traffic.enqueue(message, rank.time)
        else:
            self.sent[key] = message

    def all_arrived(self, keys: Sequence[Key], axis: str, time: float) -> None:
        """Something that ranks may wait for is there. axis: of what they have waited for."""
        for index, key in keys:
            if (index, key) not in self.waiting:
                self.done.add((index, key))
                continue
            self.waiting.remove((index, key))
            rank = self.ranks[index]
            rank.next += 1
            rank.waits[axis] = rank.waits.get(axis, 0.0) + time - rank.time
            self.advance(index, time)
