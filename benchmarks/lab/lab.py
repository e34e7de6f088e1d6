"""Ranks in namespaces of their own, for whoever asks: `with open_lab(Shape(2, 2)) as lab`.

    caller ---- pipe ---- lab, in a user namespace: root there, an ordinary user outside
                           |  makes the namespaces and the links, and changes their rates
                           +-- pipe -- rank 0 .. n-1, each in a network namespace of its own

Everything ends with the caller: the lab is sent SIGKILL when its parent is gone, the ranks when the lab is, and the
namespaces are gone with the processes. Ranks are started with torchrun's environment variables.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from benchmarks.lab.namespaces import Links, Shape, address, enter
from shardiff.system.processes import nameless_file, when_parent_ends

ROOT = Path(__file__).resolve().parents[2]
UNSHARE = ["unshare", "--user", "--map-root-user", "--net"]
PORT = 29511  # inside the namespaces
PATIENCE = 120.0  # seconds that ranks may take for one answer
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # memory that is given back and asked for again costs page faults in every step
    "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776:glibc.malloc.arena_max=1",
}


class LabError(RuntimeError):
    """The lab or one of its ranks failed, in a few lines."""


def refusal() -> str | None:
    """Why no lab can be opened here, in one line with what to do; None if one can."""
    for tool, package in (("unshare", "util-linux"), ("ip", "iproute2"), ("tc", "iproute2")):
        if shutil.which(tool) is None:
            return f"{tool} is missing; install {package}"
    script = "ip link add p0 type veth peer name q0 && tc qdisc add dev q0 root tbf rate 1gbit burst 64k limit 1m"
    try:
        done = subprocess.run([*UNSHARE, "sh", "-c", script], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"namespaces cannot be tried: {error}"
    if done.returncode == 0:
        return None
    why = " ".join(done.stderr.split())[:200] or f"status {done.returncode}"
    return (
        f"this machine does not let its users make network namespaces with shaped links ({why}); allow them with "
        "sysctl user.max_user_namespaces=1000 kernel.apparmor_restrict_unprivileged_userns=0, or run in a container "
        "started with --privileged"
    )


class Lab:
    """The caller's end: rates are set, and functions are called on all ranks."""

    def __init__(self, shape: Shape, connection: Connection, process: subprocess.Popen[bytes], log: Path) -> None:
        self.shape, self.connection, self.process, self.log = shape, connection, process, log

    def rates(self, inside: float | None, between: float | None) -> None:
        """Shape the links, in bit/s."""
        self._ask("rates", inside, between)

    def call(self, module: str, name: str, *args: Any) -> list[Any]:
        """module.name(*args) on every rank: results by rank. Raises LabError if a rank fails, or is silent for long."""
        return self._ask("call", module, name, args)

    def _ask(self, *request: Any) -> Any:
        try:
            self.connection.send(request)
            if not self.connection.poll(PATIENCE + 30):
                raise LabError("the lab does not answer")
            kind, answer = self.connection.recv()
        except (EOFError, OSError):
            raise LabError(f"the lab has ended: {self.tail()}") from None
        if kind == "error":
            raise LabError(f"{answer}\n{self.tail()}")
        return answer

    def tail(self) -> str:
        """The end of what the lab and its ranks have printed."""
        with suppress(OSError):
            return self.log.read_text(errors="replace")[-2000:].strip()
        return ""


@contextmanager
def open_lab(shape: Shape) -> Iterator[Lab]:
    """A lab whose ranks are ready. Raises LabError."""
    ours, theirs = Pipe()
    with ExitStack() as stack:
        log = nameless_file(stack)
        what = (theirs.fileno(), shape.hosts, shape.devices, os.getpid())
        with open(log, "wb") as out:
            process = subprocess.Popen(
                [*UNSHARE, sys.executable, "-m", "benchmarks.lab.lab", *map(str, what)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT},
            )
        theirs.close()
        lab = Lab(shape, ours, process, log)
        try:
            lab.call("benchmarks.lab.rank", "ready")
            yield lab
        finally:
            ours.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def serve(caller: Connection, shape: Shape) -> None:
    """What the lab runs: links and ranks until the caller is gone."""
    links = Links(shape)
    ranks: list[tuple[subprocess.Popen[bytes], Connection]] = []
    try:
        try:
            links.make()
            ranks = [start(links, rank) for rank in range(shape.ranks)]
        except (OSError, RuntimeError) as error:
            caller.send(("error", str(error)))
            return
        while True:
            try:
                request = caller.recv()
            except (EOFError, OSError):
                return
            try:
                if request[0] == "rates":
                    answer = links.set_rates(*request[1:])
                else:
                    answer = on_ranks([connection for _, connection in ranks], *request[1:])
                caller.send(("done", answer))
            except (RuntimeError, OSError, EOFError) as error:
                caller.send(("error", str(error)))
                return
    finally:
        for process, _ in ranks:
            process.kill()
        for process, _ in ranks:
            process.wait()
        links.close()


def start(links: Links, rank: int) -> tuple[subprocess.Popen[bytes], Connection]:
    """One rank in its namespace, with torchrun's variables."""
    ours, theirs = Pipe()
    namespace, size = links.of_ranks[rank], links.shape.ranks

    def enter_and_end_with_the_lab() -> None:
        enter(namespace)
        when_parent_ends(signal.SIGKILL)

    where = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address(0), "MASTER_PORT": str(PORT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.lab.rank", str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        env={**os.environ, **where},
        preexec_fn=enter_and_end_with_the_lab,
    )
    theirs.close()
    return process, ours


def on_ranks(connections: list[Connection], module: str, name: str, args: tuple[Any, ...]) -> list[Any]:
    """Call a function on all ranks. Raises RuntimeError if one fails, ends, or does not answer."""
    for connection in connections:
        connection.send((module, name, args))
    results: dict[Connection, Any] = {}
    while len(results) < len(connections):
        ready = wait([one for one in connections if one not in results], PATIENCE)
        if not ready:
            missing = [str(rank) for rank, one in enumerate(connections) if one not in results]
            raise RuntimeError(f"no answer of rank {', '.join(missing)} to {name} for {PATIENCE:.0f} s")
        for connection in ready:
            assert isinstance(connection, Connection)
            try:
                kind, answer = connection.recv()
            except (EOFError, OSError):
                raise RuntimeError(f"rank {connections.index(connection)} has ended in {name}") from None
            if kind == "error":
                raise RuntimeError(f"rank {connections.index(connection)} failed in {name}: {answer}")
            results[connection] = answer
    return [results[connection] for connection in connections]


if __name__ == "__main__":
    fd, hosts, devices, parent = map(int, sys.argv[1:])
    when_parent_ends(signal.SIGKILL)
    if os.getppid() == parent:  # else it has ended before it could be told
        serve(Connection(fd), Shape(hosts, devices))
