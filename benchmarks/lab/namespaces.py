"""Shaped links on one machine: network namespaces without names, one for each rank, joined by bridges.

A namespace lives as long as a process holds its file descriptor or runs in it, so nothing is left behind, whoever is
killed. The bridges are in a namespace of their own, and no interface leads out of it. Every port has a token bucket
(tc-tbf) at both ends:

    rank 0 -- eth0 == p0 -- br0 -- up0 == dn0 -- core -- dn1 == up1 -- br1 -- p2 == eth0 -- rank 2
    rank 1 -- eth0 == p1 --/                                            \\-- p3 == eth0 -- rank 3

What cost hours to find out: an MTU of 1500 loses a third of the rate in full duplex; BBR cuts an unshaped veth to a
tenth, so the routes ask for cubic; a queue that drops costs TCP 200 ms each time, so it never does; a burst much below
0.5 ms of the rate starves fast links; and what gloo tells a sender, that its receiver is ready, waits in the queue of
the data that go the other way, which costs up to 20 % of the rate, so packets and windows are small.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import dataclass, field

CLONE_NEWNET = 0x40000000
SUBNET = "10.83.0"  # inside the namespaces only
MTU = 9000
# Of a frame of 9014 bytes on an interface, what TCP carries: without the headers of Ethernet, IP and TCP with times.
GOODPUT = 8948 / 9014
QUEUE = 64 << 20  # bytes: never full
BURST_SECONDS, LEAST_BURST = 0.0005, 18_000  # of the rate; bytes, two frames
WINDOW = 36_000  # bytes that a connection has on its way at most, four frames
FAST = 400e9  # bit/s, for a link that is not shaped


@dataclass(frozen=True)
class Shape:
    """hosts x devices ranks."""

    hosts: int
    devices: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.devices

    def __str__(self) -> str:
        return f"{self.hosts}x{self.devices}"


def burst_of(rate: float) -> int:
    """Bytes that a link of so many bit/s lets pass at once."""
    return max(int(rate / 8 * BURST_SECONDS), LEAST_BURST)


def packet_of(rate: float) -> int:
    """Bytes that the kernel hands over at once on a link of so many bit/s. TCP has two of these wait for a link, and
    what gloo tells a sender waits behind them."""
    return min(max(int(rate / 8 * BURST_SECONDS), LEAST_BURST), 65_536)


def address(rank: int) -> str:
    """Where a rank listens."""
    return f"{SUBNET}.{rank + 1}"


@dataclass
class Links:
    """The namespaces and links of a shape. Needs the rights of root in this network namespace, or user namespace."""

    shape: Shape
    switch: int = -1
    of_ranks: list[int] = field(default_factory=list)

    def make(self) -> None:
        """Set up everything, unshaped; tens of milliseconds. Raises OSError or RuntimeError where it is refused."""
        shape = self.shape
        self.switch = new_namespace()
        self.of_ranks = [new_namespace() for _ in range(shape.ranks)]
        lines = ["link set lo up"]
        for bridge in (*(f"br{host}" for host in range(shape.hosts)), *(["core"] if shape.hosts > 1 else [])):
            lines += [f"link add {bridge} type bridge stp_state 0 mcast_snooping 0", f"link set {bridge} mtu {MTU} up"]
        if shape.hosts > 1:
            for host in range(shape.hosts):
                lines += [
                    f"link add up{host} mtu {MTU} type veth peer name dn{host} mtu {MTU}",
                    f"link set up{host} master br{host} up",
                    f"link set dn{host} master core up",
                ]
        for rank, namespace in enumerate(self.of_ranks):
            there = f"/proc/{os.getpid()}/fd/{namespace}"
            lines += [
                f"link add p{rank} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {there}",
                f"link set p{rank} master br{rank // shape.devices} up",
            ]
        batch(self.switch, "ip", lines)
        for rank, namespace in enumerate(self.of_ranks):
            up = ["link set lo up", f"address add {address(rank)}/24 dev eth0", "link set eth0 up"]
            batch(namespace, "ip", [*up, f"route replace {SUBNET}.0/24 dev eth0 congctl cubic window {WINDOW}"])

    def set_rates(self, inside: float | None, between: float | None) -> None:
        """Shape the links: bit/s of every rank's own, and of every host's to the others; None: not shaped."""
        ports = [f"p{rank}" for rank in range(self.shape.ranks)]
        lines = [shaped(port, inside) for port in ports]
        if self.shape.hosts > 1:
            lines += [shaped(f"{end}{host}", between) for host in range(self.shape.hosts) for end in ("up", "dn")]
        batch(self.switch, "tc", lines)
        for namespace in self.of_ranks:
            batch(namespace, "tc", [shaped("eth0", inside)])
            batch(namespace, "ip", [f"link set eth0 gso_max_size {packet_of(inside or between or FAST)}"])

    def close(self) -> None:
        """Let go of the namespaces: they are gone once no process runs in them."""
        for namespace in (*self.of_ranks, self.switch):
            if namespace >= 0:
                os.close(namespace)
        self.of_ranks, self.switch = [], -1


def shaped(port: str, rate: float | None) -> str:
    """The line for tc. A port without a rate gets a rate that no machine reaches here, so that it can be replaced."""
    bits = int(rate or FAST)
    return f"qdisc replace dev {port} root tbf rate {bits}bit burst {burst_of(bits)} limit {QUEUE}"


def new_namespace() -> int:
    """A file descriptor of a new network namespace. This thread stays where it is."""
    back = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("unshare", CLONE_NEWNET)
        made = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        enter(back)
    finally:
        os.close(back)
    return made


def enter(namespace: int) -> None:
    """Move this thread into a network namespace."""
    _call("setns", namespace, CLONE_NEWNET)


def _call(name: str, *args: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def batch(namespace: int, tool: str, lines: list[str]) -> None:
    """`ip -batch -` or `tc -batch -` in a namespace. Raises RuntimeError, one line, if a line fails."""
    done = subprocess.run(
        [tool, "-batch", "-"],
        input="".join(f"{line}\n" for line in lines),
        text=True,
        capture_output=True,
        preexec_fn=lambda: enter(namespace),
    )
    if done.returncode:
        raise RuntimeError(f"{tool}: {' '.join(done.stderr.split())}")
