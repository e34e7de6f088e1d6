"""The campaign: all inputs in a few processes, each of which is replaced if it dies or hangs."""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from shared_tests.tool.fuzz.seeds import hlo_seeds, json_seeds
from shared_tests.tool.fuzz.trial import one

STUCK = 120  # seconds without an answer after which a process counts as stuck where no signal reaches it
MEMORY = 10**9  # bytes of address space that an input may take beside what the process had
KINDS = ("hlo", "json")


@dataclass
class Tally:
    """What became of the inputs. outcomes: of a kind, by mutation; failures: (kind, number, what happened)."""

    outcomes: dict[str, Counter[tuple[str, str]]] = field(default_factory=lambda: {kind: Counter() for kind in KINDS})
    failures: list[tuple[str, int, str]] = field(default_factory=list)
    slowest: dict[str, tuple[float, int]] = field(default_factory=lambda: dict.fromkeys(KINDS, (0.0, -1)))
    peak_bytes: int = 0

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        for kind in KINDS:
            self.outcomes[kind] += other.outcomes[kind]
            self.slowest[kind] = max(self.slowest[kind], other.slowest[kind])
        self.failures += other.failures
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)

    def count(self, kind: str) -> int:
        """Inputs of a kind that have ended, well or not."""
        return sum(self.outcomes[kind].values())


def serve(jobs: list[tuple[str, int]], seed: int, root: str, connection: Connection) -> None:
    """A process's share of the inputs: before each its place in `jobs` is sent, every so often a Tally."""
    directory = Path(tempfile.mkdtemp(dir=root))
    hlo_seeds()
    json_seeds()
    for kind in ("hlo", "json"):
        one(kind, 0, 0, directory)  # imports, and what they take
    statm = Path("/proc/self/statm").read_text().split()
    limit = int(statm[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tally, last = Tally(), time.monotonic()
    for place, (kind, number) in enumerate(jobs):
        connection.send(place)
        began = time.process_time()
        mutation, outcome, why = one(kind, seed, number, directory)
        tally.slowest[kind] = max(tally.slowest[kind], (time.process_time() - began, number))
        tally.outcomes[kind][mutation, outcome] += 1
        if why:
            tally.failures.append((kind, number, why))
        if time.monotonic() - last > 0.5 or place == len(jobs) - 1:
            tally.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            connection.send(tally)
            tally, last = Tally(), time.monotonic()
    connection.send(None)


@dataclass
class Share:
    """A process and the inputs that it has left. A process that dies or hangs is replaced by one for what is left."""

    jobs: list[tuple[str, int]]
    seed: int
    root: str = ""
    place: int = 0
    heard: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        self.ours, theirs = multiprocessing.Pipe(duplex=False)
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(self.jobs, self.seed, self.root, theirs)
        )
        self.process.start()
        theirs.close()
        self.heard = time.monotonic()

    def lost(self, tally: Tally, why: str) -> None:
        """Note what happened to the input that the process was working on, and continue after it."""
        self.process.kill()
        self.process.join()
        kind, number = self.jobs[self.place]
        tally.failures.append((kind, number, why))
        self.jobs, self.place = self.jobs[self.place + 1 :], 0
        if self.jobs:
            self.start()


def campaign(counts: dict[str, int], seed: int, processes: int, progress: Callable[[Tally], None]) -> Tally:
    """All inputs in so many processes, whose files are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="shardiff-fuzz-") as root:
        return _campaign(counts, seed, processes, progress, root)


def _campaign(counts: dict[str, int], seed: int, processes: int, progress: Callable[[Tally], None], root: str) -> Tally:
    jobs = [(kind, number) for kind in KINDS for number in range(counts[kind])]
    shares = [Share(jobs[i::processes], seed, root) for i in range(min(processes, len(jobs)))]
    tally = Tally()
    for share in shares:
        share.start()
    while running := [share for share in shares if share.jobs]:
        ready = wait([share.ours for share in running], timeout=1)
        for share in running:
            if share.ours in ready:
                try:
                    message = share.ours.recv()
                except EOFError:
                    share.process.join()
                    share.lost(tally, f"the process ended with {share.process.exitcode}")
                    continue
                share.heard = time.monotonic()
                if message is None:
                    share.jobs = []
                    share.process.join()
                elif isinstance(message, int):
                    share.place = message
                else:
                    tally.add(message)
                    progress(tally)
            elif time.monotonic() - share.heard > STUCK:
                share.lost(tally, f"stuck: no answer for {STUCK} s, and no signal reached it")
    return tally
