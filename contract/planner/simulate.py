"""An event simulation of one training step: ranks that compute, wait and send, on links that they share.

Ranks that do the same at the same time are simulated as one: without a pipeline a single rank stands for all, and with
one a rank of each stage. (The ranks with the most rows and parameters are taken, so the step is that of the busiest.)
A rank stands for all groups of its kind on its host when it comes to what these share.

Every device has one link out and one in, and every host one link out and one in to the other hosts. What is sent over a
link at the same time shares it equally. A token bucket lets `burst` bytes pass at once after a pause. The collectives
of one group run one after the other, and so do the messages from one stage to another; a message moves once it is sent
and its receiver is ready for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from contract.planner.instructions import Begin, Compute, End, Instructions, Receive, Send
from contract.planner.places import Place
from shardiff.cost import Group, Network

Key = str | tuple[int, str]  # of a message, and of a rank's collective


@dataclass
class Link:
    """A link in one direction. weight: of what is being sent. tokens: bytes that may pass at once, as of `since`."""

    bandwidth: float
    burst: float
    weight: float = 0.0
    tokens: float = 0.0
    since: float = 0.0
    active: list[Transfer] = field(default_factory=list)


@dataclass(eq=False)
class Transfer:
    """Bytes on their way. parts: (link, weight): how many such flows share the link. most: bytes/s at most."""

    size: float
    parts: list[tuple[Link, float]]
    most: float
    latency: float
    key: Key
    queue: tuple[object, ...]
    rate: float = 0.0
    at: float = 0.0
    version: int = 0


@dataclass
class Rank:
    """How far a simulated rank is. waits: what for -> seconds; spent: what is computed -> seconds."""

    todo: Instructions
    place: Place
    next: int = 0
    time: float = 0.0
    joined: int = 0
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
    """The state of `simulate`: events in order of time, links, and who waits for what."""

    def __init__(self, ranks: list[Rank], network: Network, stages: str) -> None:
        self.ranks, self.network, self.stages = ranks, network, stages
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.count = 0
        self.links: dict[tuple[str, int], Link] = {}
        self.done: set[Key] = set()
        self.waiting: dict[Key, int] = {}
        self.queues: dict[tuple[object, ...], list[Transfer]] = {}
        self.sent: dict[str, Transfer] = {}  # messages whose receiver is not ready
        self.expected: set[str] = set()  # messages that are not sent yet
        self.joined: list[list[tuple[float, Key]]] = []  # collectives of all stages: who has started them

    def run(self) -> Outcome:
        for index in range(len(self.ranks)):
            self.advance(index, 0.0)
        while self.events:
            time, _, happen = heapq.heappop(self.events)
            happen(time)
        for index, rank in enumerate(self.ranks):
            if rank.next < len(rank.todo):
                raise Stuck(f"rank {index} waits forever for {rank.todo[rank.next]}")
        ends = tuple(rank.time for rank in self.ranks)
        return Outcome(max(ends), ends, tuple(r.spent for r in self.ranks), tuple(r.waits for r in self.ranks))

    def at(self, time: float, happen: Callable[[float], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, happen))

    def advance(self, index: int, time: float) -> None:
        """Let a rank go on until it computes or has to wait."""
        rank = self.ranks[index]
        rank.time, todo, many = time, rank.todo, len(rank.todo)
        while rank.next < many:
            now = todo[rank.next]
            if isinstance(now, Compute):
                rank.next += 1
                rank.spent[now.what] = rank.spent.get(now.what, 0.0) + now.seconds
                self.at(time + now.seconds, partial(self.advance, index))
                return
            if isinstance(now, End | Receive):
                key = (index, now.key) if isinstance(now, End) else now.key
                if key not in self.done:
                    self.waiting[key] = index
                    return
                self.done.remove(key)  # the next pass has collectives of the same names
            elif isinstance(now, Begin):
                self.begin(index, rank, now)
            elif isinstance(now, Send):
                self.send(index, rank, now)
            elif now.key in self.sent:
                self.enqueue(self.sent.pop(now.key), time)
            else:
                self.expected.add(now.key)
            rank.next += 1

    def begin(self, index: int, rank: Rank, one: Begin) -> None:
        """Start a collective, or queue it behind the one of the same group that runs."""
        group = rank.place.groups[one.axis]
        latency = self.network.latency(one.op, group)
        if one.axis == self.stages:
            self.join(index, rank, one, latency)
            return
        parts = [(self.link("out", index), 1.0), (self.link("in", index), 1.0)]
        most = float("inf")
        if group.hosts > 1:
            flows = rank.place.many / group.per_host
            parts += [(self.link("up", rank.place.host), flows), (self.link("down", rank.place.host), flows)]
            most = self.network.limit(group)
        size = self.network.wire(one.op, one.payload, group)
        self.enqueue(Transfer(size, parts, most, latency, (index, one.key), (index, one.axis)), rank.time)

    def join(self, index: int, rank: Rank, one: Begin, latency: float) -> None:
        """A scalar of all stages, summed as soon as all of them have started that."""
        rank.joined += 1
        if len(self.joined) < rank.joined:
            self.joined.append([])
        those = self.joined[rank.joined - 1]
        those.append((rank.time, (index, one.key)))
        if len(those) == len(self.ranks):
            for _, key in those:
                self.at(max(time for time, _ in those) + latency, partial(self.arrived, key))

    def send(self, index: int, rank: Rank, one: Send) -> None:
        """A message moves when both its sender and its receiver are ready."""
        to = self.ranks[one.to].place
        parts, most = [(self.link("out", index), 1.0), (self.link("in", one.to), 1.0)], float("inf")
        pair = Group(2, 1 + (to.host != rank.place.host))
        if pair.hosts > 1:
            parts += [(self.link("up", rank.place.host), rank.place.many), (self.link("down", to.host), to.many)]
            most = self.network.limit(pair)
        latency = self.network.latency("collective_permute", pair)
        size = self.network.wire("collective_permute", one.size, pair)
        transfer = Transfer(size, parts, most, latency, one.key, (index, "to", one.to))
        if one.key in self.expected:
            self.expected.remove(one.key)
            self.enqueue(transfer, rank.time)
        else:
            self.sent[one.key] = transfer

    def link(self, kind: str, index: int) -> Link:
        if (kind, index) not in self.links:
            of = self.network.inside if kind in ("out", "in") else self.network.between
            self.links[kind, index] = Link(of.bandwidth, of.burst, tokens=of.burst)
        return self.links[kind, index]

    def enqueue(self, transfer: Transfer, time: float) -> None:
        queue = self.queues.setdefault(transfer.queue, [])
        queue.append(transfer)
        if len(queue) == 1:
            self.start(transfer, time)

    def start(self, transfer: Transfer, time: float) -> None:
        """Put a transfer on its links. What their buckets let pass at once does not take time."""
        limited = [(link, weight) for link, weight in transfer.parts if link.burst]
        if limited:
            for link, _ in limited:
                idle = 0.0 if link.active else time - link.since
                link.tokens = min(link.burst, link.tokens + idle * link.bandwidth)
            free = min(transfer.size, *(link.tokens / weight for link, weight in limited))
            for link, weight in limited:
                link.tokens -= free * weight
            transfer.size -= free
        transfer.at = time
        for link, weight in transfer.parts:
            link.active.append(transfer)
            link.weight += weight
        self.share(transfer, time)

    def share(self, changed: Transfer, time: float) -> None:
        """Give everyone who shares a link with `changed` their new rate."""
        touched = dict.fromkeys(other for link, _ in changed.parts for other in link.active)
        for one in touched:
            one.size = max(0.0, one.size - one.rate * (time - one.at))
            one.at = time
            one.rate = min(one.most, *(link.bandwidth / link.weight for link, _ in one.parts))
            one.version += 1
            self.at(time + one.size / one.rate, partial(self.finished, one, one.version))

    def finished(self, transfer: Transfer, version: int, time: float) -> None:
        """All bytes are sent, unless the rate has changed meanwhile. They are there after the latency."""
        if version != transfer.version:
            return
        for link, weight in transfer.parts:
            link.active.remove(transfer)
            link.weight = link.weight - weight if link.active else 0.0
            link.since = time
        self.share(transfer, time)
        queue = self.queues[transfer.queue]
        if isinstance(transfer.key, str):  # the next message does not wait for this one to arrive
            self.following(queue, time)
            self.at(time + transfer.latency, partial(self.arrived, transfer.key))
        else:  # the latency is that of the steps of a collective, and the next one of its group follows

            def over(now: float) -> None:
                self.following(queue, now)
                self.arrived(transfer.key, now)

            self.at(time + transfer.latency, over)

    def following(self, queue: list[Transfer], time: float) -> None:
        queue.pop(0)
        if queue:
            self.start(queue[0], time)

    def arrived(self, key: Key, time: float) -> None:
        """Something that a rank may wait for is there."""
        self.done.add(key)
        index = self.waiting.pop(key, None)
        if index is not None:
            rank = self.ranks[index]
            axis = self.stages if isinstance(key, str) else key[1].split(" ")[0]
            rank.waits[axis] = rank.waits.get(axis, 0.0) + time - rank.time
            self.advance(index, time)
