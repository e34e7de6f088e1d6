"""How long communication takes: a program's records x links -> seconds.

A network has two levels: `hosts`, and the devices of each. A collective runs as a ring (Patarasu and Yuan, 2009): each
rank sends its wire bytes to the next one. In a ring over several hosts one member of each host sends to another host,
so the bytes that leave a host for one group are the wire bytes of one rank; all groups of an axis send at the same
time, and share what their host can send.

    seconds = latency + wire bytes x overhead / bandwidth
    bandwidth = min(a device's links, a host's links to other hosts / groups that share them)
    latency = call + (steps - s) x latency inside + s x latency between, where s of the ring's steps wait for a host
    steps = 2 (n - 1) for all_reduce, n - 1 for all_gather and reduce_scatter, 1 for a permute

This is NCCL's own model of a ring (src/graph/tuning.cc). Where a library was measured, its fit replaces the latency,
and `overhead` is the factor by which the time of its bytes exceeds that of the optimal ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from shardiff.program import Program
from shardiff.record import Record, wire_factor


@dataclass(frozen=True)
class Link:
    """bandwidth: bytes/s in each direction. latency: seconds of one step. burst: bytes that pass at once after a pause,
    as a token bucket lets them. window: bytes of one transfer that are in the link's queue at once, so that transfers
    take turns of so many bytes; 0: they share the link equally."""

    bandwidth: float
    latency: float = 0.0
    burst: float = 0.0
    window: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < float("inf") or not 0 <= self.latency < float("inf"):
            raise ValueError(f"a link needs a bandwidth above 0 and a latency of at least 0, got {self}")
        if self.burst < 0 or self.window < 0:
            raise ValueError(f"a link needs a burst and a window of at least 0, got {self}")


@dataclass(frozen=True)
class Measured:
    """A library's collective on so many ranks. latency: seconds of a call without bytes. overhead: the time of its
    bytes over that of the optimal ones at the link's bandwidth. sent: the bytes themselves over the optimal ones, where
    that is known; while the rest of the time passes, something else can have the link. rounds: in how many parts it is
    sent, of which each waits for the one before."""

    latency: float
    overhead: float = 1.0
    sent: float | None = None
    rounds: int = 1


@dataclass(frozen=True)
class Group:
    """A group of ranks on the network. hosts: how many it lies on. shared: how many such groups send from one host to
    others at the same time."""

    size: int
    hosts: int = 1
    shared: int = 1

    @property
    def per_host(self) -> int:
        """Members on each host, the most where hosts differ."""
        return -(-self.size // self.hosts)


@dataclass(frozen=True)
class Network:
    """hosts x devices. inside: the links of one device. between: those of one host to all others, together.

    interfaces: into how many `between` is divided; a message uses one of them. call: seconds of a collective before its
    first step. measured: (op, ranks) -> what a library was measured to take. together: how many collectives of one
    group a library runs at the same time; NCCL runs one, gloo two.
    """

    inside: Link
    between: Link
    hosts: int = 1
    devices: int = 1
    interfaces: int = 1
    call: float = 0.0
    measured: Mapping[tuple[str, int], Measured] = field(default_factory=dict)
    together: int = 1

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.devices < 1 or self.interfaces < 1:
            raise ValueError(f"a network needs at least 1 host of 1 device, got {self.hosts} x {self.devices}")

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.hosts * self.devices

    def group(self, ranks: Sequence[int], together: int = 1) -> Group:
        """Ranks as a group. together: how many groups of as many ranks of each host send at the same time."""
        return Group(len(ranks), len({rank // self.devices for rank in ranks}), together)

    def limit(self, group: Group) -> float:
        """Bytes/s of one rank's ring traffic on interfaces between hosts that other groups leave alone."""
        return self.between.bandwidth * min(group.per_host, self.interfaces) / self.interfaces

    def bandwidth(self, group: Group) -> float:
        """Bytes/s that each rank of the group sends when all groups do."""
        if group.hosts == 1:
            return self.inside.bandwidth
        return min(self.inside.bandwidth, self.between.bandwidth / group.shared, self.limit(group))

    def latency(self, op: str, group: Group) -> float:
        """Seconds of a collective without bytes."""
        if self.measured and (measured := self._measured(op, group.size)) is not None:
            return measured.latency
        if op == "collective_permute":
            return self.call + (self.inside if group.hosts == 1 else self.between).latency
        twice = 2 if op == "all_reduce" else 1
        steps, over = twice * (group.size - 1), twice * (group.hosts - 1)
        return self.call + (steps - over) * self.inside.latency + over * self.between.latency

    def wire(self, op: str, payload: float, group: Group) -> float:
        """Bytes that pass a rank's links, as many as take the time that the library needs."""
        measured = self._measured(op, group.size) if self.measured else None
        return payload * _factor(op, group.size) * (measured.overhead if measured else 1.0)

    def moved(self, op: str, payload: float, group: Group) -> tuple[float, float]:
        """Bytes that pass a rank's links, and the seconds besides in which the links are free and the call goes on.

        These are those of bytes as well, which take longer where groups share a link.
        """
        wire = self.wire(op, payload, group)
        measured = self._measured(op, group.size) if self.measured else None
        if measured is None or measured.sent is None or measured.sent >= measured.overhead:
            return wire, 0.0
        sent = wire * measured.sent / measured.overhead
        return sent, (wire - sent) / self.bandwidth(group)

    def rounds(self, op: str, group: Group) -> int:
        """In how many parts a collective is sent, of which each waits for the one before."""
        measured = self._measured(op, group.size) if self.measured else None
        return measured.rounds if measured else 1

    def seconds(self, op: str, payload: float, group: Group) -> float:
        """Of one collective while nothing else is sent. payload: bytes as a record counts them."""
        if group.size == 1:
            return 0.0
        return self.latency(op, group) + self.wire(op, payload, group) / self.bandwidth(group)

    def _measured(self, op: str, ranks: int) -> Measured | None:
        """Of as many ranks, or of the next number that was measured, with a latency that grows with the steps."""
        if (exact := self.measured.get((op, ranks))) is not None or ranks < 2:
            return exact
        known = [n for of, n in self.measured if of == op]
        if not known:
            return None
        nearest = min(known, key=lambda n: (abs(n - ranks), n))
        found = self.measured[op, nearest]
        grown = 1.0 if op == "collective_permute" else (ranks - 1) / (nearest - 1)
        return replace(found, latency=found.latency * grown)

    def with_links(self, inside: float | None = None, between: float | None = None) -> Network:
        """The same network with links of other bandwidths, in bytes/s. A burst keeps its duration."""

        def at(link: Link, bandwidth: float | None) -> Link:
            if bandwidth is None:
                return link
            return replace(link, bandwidth=bandwidth, burst=link.burst * bandwidth / link.bandwidth)

        return replace(self, inside=at(self.inside, inside), between=at(self.between, between))


@lru_cache(1024)
def _factor(op: str, ranks: int) -> float:
    return float(wire_factor(op, ranks))


def seconds(program: Program | Iterable[Record], network: Network) -> dict[str, float]:
    """Axis -> seconds that the program's communication takes in one step, if one collective follows another.

    Records whose axis is unknown count under "". Raises ValueError for a rank that the network does not have.
    """
    by_axis: dict[str, float] = {}
    for record in program:
        taken = record.times * of_record(record, network)
        by_axis[record.axis or ""] = by_axis.get(record.axis or "", 0.0) + taken
    return by_axis


def of_record(record: Record, network: Network) -> float:
    """Seconds of one execution: of the slowest of its groups or messages."""
    groups = record.edges if record.edges is not None else record.groups
    if groups is None:
        groups = (tuple(range(record.group_size or 1)),)
    if (most := max((rank for group in groups for rank in group), default=0)) >= network.size:
        raise ValueError(f"rank {most} is not on a network of {network.hosts} x {network.devices} devices")
    leaving: dict[int, int] = {}  # host -> messages that it sends to other hosts at the same time
    for group in groups:
        pairs = [group] if record.edges is not None else zip(group, [*group[1:], group[0]], strict=True)
        for source, target in pairs:
            if (host := source // network.devices) != target // network.devices:
                leaving[host] = leaving.get(host, 0) + 1
    slowest = 0.0
    for group in groups:
        together = max((leaving.get(rank // network.devices, 0) for rank in group), default=0)
        where = network.group(group, max(together, 1))
        slowest = max(slowest, network.seconds(record.op, record.payload_bytes, where))
    return slowest
