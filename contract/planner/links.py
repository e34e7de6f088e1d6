"""Bytes on their way: links that transfers share, and the order in which a group's collectives are sent.

Every device has one link out and one in, and every host one link out and one in to the other hosts. A token bucket
lets `burst` bytes pass at once after a pause. What is sent over a link at the same time shares it equally; over a link
with a `window`, transfers take turns instead, each with so many bytes, as packets in a queue do: of two that begin
together the first one is done earlier.

What a group sends is in a line: `together` collectives of it run at the same time, and each puts its bytes there in
rounds, the next one when the one before is there. So a short collective overtakes a longer one of several rounds.
One direction of a collective may lag behind the other one, as in gloo's all_gather, where one rank may only send when
the other one's bytes are through. What follows in the line does not wait for that, but lags behind as well.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from shardiff import cost

Event = Callable[[float], None]


class Clock:
    """Events in order of time, and of their making where times are equal."""

    def __init__(self) -> None:
        self.events: list[tuple[float, int, Event]] = []
        self.count = 0

    def at(self, time: float, happen: Event) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, happen))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self.events:
            time, _, happen = heapq.heappop(self.events)
            happen(time)


@dataclass(eq=False)
class Link:
    """A link in one direction. weight: of what is being sent. tokens: bytes that may pass at once, as of `since`.
    turns: pieces that wait for the link or are on it, where transfers take turns."""

    bandwidth: float
    burst: float
    window: float
    weight: float = 0.0
    tokens: float = 0.0
    since: float = 0.0
    active: list[Piece] = field(default_factory=list)
    turns: list[Piece] = field(default_factory=list)


@dataclass(frozen=True)
class Transfer:
    """A collective or a message to be sent. parts: (link, weight): how many such flows share the link. most: bytes/s at
    most. latency: seconds from the last byte until it is there. arrived: what happens then. line: (axis, first rank of
    its group), or (sender, receiver). rounds: into how many its bytes are divided. lag: seconds by which one direction
    is later than the other.

    A collective makes room for the next one of its group when it is there, a message when it is sent.
    """

    size: float
    parts: list[tuple[Link, float]]
    most: float
    latency: float
    arrived: Event
    line: tuple[str | int, int]
    rounds: int = 1
    lag: float = 0.0

    @property
    def message(self) -> bool:
        """Whether it is a message and no collective."""
        return not isinstance(self.line[0], str)


@dataclass
class Line:
    """What one group, or one pair of ranks, sends. waiting: not begun. running: how many have begun. rounds: those in
    line, (transfer, how many are left with this one); busy: whether the first one is being sent. lag: of one direction
    behind the other; until: when both are through."""

    waiting: list[Transfer] = field(default_factory=list)
    running: int = 0
    busy: bool = False
    lag: float = 0.0
    until: float = 0.0
    rounds: list[tuple[Transfer, int]] = field(default_factory=list)


@dataclass(eq=False)
class Piece:
    """Bytes of a round that are on the links, or wait for their turn. left: bytes of the round after it."""

    size: float
    left: float
    of: Transfer
    line: Line
    rate: float = 0.0
    at: float = 0.0
    version: int = 0


class Traffic:
    """All that is being sent. together: collectives of one group that run at the same time."""

    def __init__(self, clock: Clock, network: cost.Network) -> None:
        self.clock, self.network = clock, network
        self.links: dict[tuple[str, int], Link] = {}
        self.lines: dict[tuple[str | int, int], Line] = {}

    def link(self, kind: str, index: int) -> Link:
        """kind: out or in, of a device; up or down, of a host."""
        if (kind, index) not in self.links:
            of = self.network.inside if kind in ("out", "in") else self.network.between
            self.links[kind, index] = Link(of.bandwidth, of.burst, of.window, tokens=of.burst)
        return self.links[kind, index]

    def enqueue(self, transfer: Transfer, time: float) -> None:
        """Begin a transfer, or queue it behind those of its line that run."""
        line = self.lines.setdefault(transfer.line, Line())
        line.waiting.append(transfer)
        self.following(line, time)

    def following(self, line: Line, time: float) -> None:
        """Begin what there is room for."""
        while line.waiting and line.running < (1 if line.waiting[0].message else self.network.together):
            line.running += 1
            transfer = line.waiting.pop(0)
            self.put(line, transfer, transfer.rounds, time)

    def put(self, line: Line, transfer: Transfer, left: int, time: float) -> None:
        """A round at the end of the line."""
        line.rounds.append((transfer, left))
        self.send(line, time)

    def send(self, line: Line, time: float) -> None:
        """The first round of the line goes to the links, unless one is there."""
        if line.rounds and not line.busy:
            line.busy = True
            transfer = line.rounds[0][0]
            line.lag = max(transfer.lag, line.lag if time < line.until else 0.0)
            self.take_turns(Piece(0.0, transfer.size / transfer.rounds, transfer, line), time)

    def take_turns(self, piece: Piece, time: float) -> None:
        """The next bytes of a round, which wait behind others on links that have a window."""
        queued = [link for link, _ in piece.of.parts if link.window]
        piece.size = min([piece.left, *(link.window for link in queued)])
        piece.left -= piece.size
        for link in queued:
            link.turns.append(piece)
        if all(link.turns[0] is piece for link in queued):
            self.start(piece, time)

    def start(self, piece: Piece, time: float) -> None:
        """Put bytes on their links. What the links' buckets let pass at once does not take time."""
        limited = [(link, weight) for link, weight in piece.of.parts if link.burst]
        if limited:
            for link, _ in limited:
                idle = 0.0 if link.active else time - link.since
                link.tokens = min(link.burst, link.tokens + idle * link.bandwidth)
            free = min(piece.size, *(link.tokens / weight for link, weight in limited))
            for link, weight in limited:
                link.tokens -= free * weight
            piece.size -= free
        piece.at = time
        for link, weight in piece.of.parts:
            link.active.append(piece)
            link.weight += weight
        self.share(piece, time)

    def share(self, changed: Piece, time: float) -> None:
        """Give everyone who shares a link with `changed` their new rate."""
        touched = dict.fromkeys(other for link, _ in changed.of.parts for other in link.active)
        for one in touched:
            one.size = max(0.0, one.size - one.rate * (time - one.at))
            one.at = time
            one.rate = min(one.of.most, *(link.bandwidth / link.weight for link, _ in one.of.parts))
            one.version += 1
            self.clock.at(time + one.size / one.rate, partial(self.finished, one, one.version))

    def finished(self, piece: Piece, version: int, time: float) -> None:
        """All bytes of a piece are sent, unless the rate has changed meanwhile."""
        if version != piece.version:
            return
        piece.version += 1
        queued = [link for link, _ in piece.of.parts if link.window]
        for link, weight in piece.of.parts:
            link.active.remove(piece)
            link.weight = link.weight - weight if link.active else 0.0
            link.since = time
        for link in queued:
            link.turns.remove(piece)
        self.share(piece, time)
        if piece.left > 0:
            self.take_turns(Piece(0.0, piece.left, piece.of, piece.line), time)
        else:
            self.round_sent(piece.line, time)
        for link in queued:
            if (first := link.turns[0] if link.turns else None) is not None and not first.version:
                if all(other.turns[0] is first for other, _ in first.of.parts if other.window):
                    self.start(first, time)

    def round_sent(self, line: Line, time: float) -> None:
        """It is there as soon as the direction that lags behind is through, and the next one is sent."""
        line.busy, line.until = False, time + line.lag
        transfer, left = line.rounds.pop(0)
        if left > 1:
            self.clock.at(line.until, partial(self.put, line, transfer, left - 1))
        elif transfer.message:  # the next message does not wait for this one to arrive
            line.running -= 1
            self.following(line, time)
        if left == 1:
            self.clock.at(line.until + transfer.latency, partial(self.there, transfer, line))
        self.send(line, time)

    def there(self, transfer: Transfer, line: Line, time: float) -> None:
        """The latency is that of the steps of a collective, and the next one of its group follows."""
        if not transfer.message:
            line.running -= 1
            self.following(line, time)
        transfer.arrived(time)
