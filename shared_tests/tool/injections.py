"""Injects a fault into a command that runs as a user runs it: how it ends, how soon, and what it leaves behind.

Nothing in the commands knows of this. A `sitecustomize` on PYTHONPATH, which Python runs first in every process, wraps
the one method by which ranks note their phase, and fails in rank r at the n-th time of a phase. The process that starts
the ranks and the command itself fail in the same way. A rank that fails has a process of its own running by then.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from contract.axes import STRATEGIES
from shared_tests.meta.leftovers import shm, unused

ROOT = Path(__file__).resolve().parents[2]
SABOTAGE = Path(__file__).resolve().with_name("sabotage")
LIMIT = 30.0  # seconds from the fault to the end of the command
TIMEOUT = 5.0  # --timeout of the commands, for what gets stuck
NEVER = 180.0  # seconds after which a command hangs
MARK = "SHARDIFF_FAULT"  # an environment variable: the fault, with which every process of an injection is marked

TRAINING = ("start-up", "rendezvous", "forward", "backward", "update", "teardown")
COMPILED = ("start-up", "rendezvous", "compile", "run", "teardown")
SMALL = "--batch 8 --width 8 --layers 4"
COMMANDS = {  # (command, framework) -> its options, and the phases that its ranks go through
    ("check", "torch"): (f"check --implementation torch --strategy S --steps 2 {SMALL}", TRAINING),
    ("diff", "torch"): (f"diff S {SMALL}", ("start-up", "rendezvous", "backward", "teardown")),
    ("bench collectives", "torch"): (
        "bench collectives --implementation torch --op all_reduce --ranks 2 --size 4KiB --iterations 2",
        ("start-up", "rendezvous", "all_reduce", "teardown"),
    ),
    ("bench collectives", "jax"): (
        "bench collectives --implementation jax --op all_gather --ranks 2 --size 4KiB --iterations 2",
        ("start-up", "rendezvous", "all_gather", *COMPILED[2:]),
    ),
    ("bench steps", "torch"): (
        f"bench steps --implementation torch --strategy S --ranks 2 --iterations 2 --rounds 1 {SMALL}",
        (*TRAINING, "prepare", "block", "finish"),
    ),
    ("bench steps", "jax"): (
        f"bench steps --implementation shard_map --strategy S --ranks 2 --iterations 2 --rounds 1 {SMALL}",
        (*COMPILED, "prepare", "block", "finish"),
    ),
    ("bench bubbles", "torch"): (
        f"bench bubbles --implementation torch --microbatches 2 --iterations 2 {SMALL}",
        ("start-up", "rendezvous", "forward", "backward", "teardown"),
    ),
    ("bench bubbles", "jax"): (
        f"bench bubbles --implementation annotated --microbatches 2 --iterations 2 {SMALL}",
        COMPILED,
    ),
    ("report", "torch"): ("report --quick --section check --output DIR", TRAINING),
    ("report", "jax"): ("report --quick --section bubbles --output DIR", COMPILED),
}
RANK_FAULTS = ("SIGKILL", "SIGSTOP", "raise", "exit 0", "sleep", "memory")
STUCK = ("SIGSTOP", "sleep")
STATUS = {"SIGINT": 130, "SIGTERM": -15, "SIGHUP": -1, "SIGKILL": -9}  # of a command that gets this signal


@dataclass(frozen=True)
class Injection:
    """target: "rank", "starter" (the process that starts the ranks), "process" (JAX in the command's own process), or
    "command". how: a signal, "raise", "exit 0", "sleep" or "memory". time: at the how many-th time of the phase."""

    command: str
    framework: str
    strategy: str
    target: str
    how: str
    phase: str
    rank: int = 0
    time: int = 1

    def arguments(self, directory: Path) -> list[str]:
        """What is typed after `shardiff`."""
        if self.target == "process":
            line = f"check --implementation shard_map --strategy S --degree 2 --steps 1 {SMALL}"
        else:
            line = COMMANDS[self.command, self.framework][0]
        words = [{"S": self.strategy, "DIR": str(directory / "report")}.get(word, word) for word in line.split()]
        return [*words, "--timeout", f"{TIMEOUT:g}"]

    def __str__(self) -> str:
        whom = f"rank {self.rank}" if self.target == "rank" else self.target
        return f"{self.how} of {whom} in {self.phase}{f', time {self.time}' if self.time > 1 else ''}"


@dataclass(frozen=True)
class Outcome:
    """wrong: what should have been different; empty if all was well. seconds: from the fault to the end."""

    injection: Injection
    wrong: tuple[str, ...]
    seconds: float | None
    status: int | None
    said: str
    left: tuple[str, ...]


def injections(count: int, seed: int) -> list[Injection]:
    """Seven in ten are in a rank, the others in what starts the ranks, in JAX within the command, or in the command."""
    rng = random.Random(seed)
    places, kinds = rng.sample(list(COMMANDS), len(COMMANDS)), rng.sample(RANK_FAULTS, len(RANK_FAULTS))
    strategies = itertools.cycle(rng.sample(STRATEGIES, len(STRATEGIES)))
    faults = ((place, kinds[(i + turn) % len(kinds)]) for turn in itertools.count() for i, place in enumerate(places))
    ends = zip(itertools.cycle(places), itertools.cycle(STATUS))
    starters = zip(
        itertools.cycle(place for place in places if place[1] == "torch"),
        itertools.cycle(itertools.product(("SIGSTOP", "SIGKILL"), ("call", "start-up"))),
    )
    in_process = itertools.cycle(("raise", "sleep", "memory"))
    made: dict[Injection, None] = {}
    used: Counter[str] = Counter()  # phases: the rarest is next
    while len(made) < count:
        slot = len(made) % 10
        if slot == 3:
            place, (how, phase) = next(starters)
            one = Injection(*place, next(strategies), "starter", how, phase)
        elif slot == 7:
            one = Injection("check", "jax", next(strategies), "process", next(in_process), "parameters")
        else:
            target = "command" if slot in (5, 9) else "rank"
            place, how = next(ends if target == "command" else faults)
            phase = min(COMMANDS[place][1], key=lambda name: (used[name], rng.random()))
            used[phase] += 1
            repeated = phase in ("forward", "backward", "update", "run") and place[0] not in ("diff", "report")
            again = repeated and rng.random() < 0.5
            one = Injection(*place, next(strategies), target, how, phase, rng.randrange(2), 1 + again)
        made[one] = None
    return list(made)


def inject(injection: Injection) -> Outcome:
    """Run the command with the fault, and judge how it ends."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        directory = Path(name)
        for part in ("tmp", "report"):
            (directory / part).mkdir()
        fired = directory / "fired"
        mark = json.dumps({**asdict(injection), "fired": str(fired)})
        environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
        path = os.pathsep.join((str(SABOTAGE), str(ROOT)))
        environment |= {MARK: mark, "PYTHONPATH": path, "TMPDIR": str(directory / "tmp")}
        shared = shm()
        command = [sys.executable, "-m", "shardiff", *injection.arguments(directory)]
        with open(directory / "stderr", "w+b") as stderr:
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
            )
            try:
                status = process.wait(NEVER)
            except subprocess.TimeoutExpired:
                status = None
            ended = time.monotonic()
            left = leftovers(mark, directory / "tmp", shared)
            process.kill()
            process.wait()
        said = (directory / "stderr").read_text(errors="replace")
        seconds = ended - float(fired.read_text()) if fired.exists() else None
        wrong = tuple(judge(injection, status, said, seconds, left))
        return Outcome(injection, wrong, seconds, status, said, tuple(left))


def judge(
    injection: Injection, status: int | None, said: str, seconds: float | None, left: Sequence[str]
) -> Iterator[str]:
    """What should have been different, each in a line."""
    if seconds is None:
        yield "the fault did not happen"
        return
    expected = STATUS[injection.how] if injection.target == "command" else 3
    if (injection.command, injection.how) == ("report", "SIGTERM"):  # which ends its own command first
        expected = 143
    if status != expected:
        yield f"status {status}, not {expected}"
    if seconds > LIMIT:
        yield f"it took {seconds:.0f} s"
    yield from left
    first = next((line for line in said.splitlines() if line.strip()), "")
    if injection.command.startswith("bench"):  # which names the block that failed: torch all_reduce on 2 ranks: ...
        first = re.sub(r"^[^:]* ranks: |^[^:]* stages, [^:]*: |^[^:]*: [^:]*microbatch[^:]*: ", "", first)
    if injection.target == "rank":
        kind = {"SIGKILL": "died", "exit 0": "died", "raise": "raised", "memory": "raised"}.get(
            injection.how, "is stuck"
        )
        named = f" of 2 {kind} in phase {injection.phase}"
        if not first.startswith(f"rank {injection.rank} ") or named not in first.replace(" of 4 ", " of 2 "):
            yield f"first it said: {first}"
        if injection.how in ("raise", "memory"):
            own = said.partition("Traceback")[2].partition("\nrank")[0]
            if ("ValueError: the planted error" if injection.how == "raise" else "MemoryError") not in own:
                yield "its own traceback does not come first"
        if injection.how in STUCK and said.count("last call: ") not in (2, 4):
            yield "the ranks' last calls are not said"
    elif injection.target == "starter" and not first.startswith("the process that starts the ranks failed"):
        yield f"first it said: {first}"
    elif injection.target == "process":
        words = {"raise": "the planted error", "memory": "MemoryError", "sleep": "is stuck"}[injection.how]
        if (
            not said.strip().splitlines()[-1].startswith(f"shardiff: shard_map {injection.strategy}")
            or words not in said
        ):
            yield f"last it said: {said.strip().splitlines()[-1:]}"


def leftovers(mark: str, directory: Path, shared: set[Path], patience: float = 5) -> list[str]:
    """What is left of an injection: processes, ports, temporary files, shared memory. They may take a moment to go.

    Shared memory has no mark: it counts as left if it is new and no process uses it.
    """
    end = time.monotonic() + patience
    while ((processes := list(marked(mark))) or unused(shm() - shared)) and time.monotonic() < end:
        time.sleep(0.05)
    found = []
    for process in processes:
        with suppress(psutil.Error):
            ports = [c.laddr.port for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            found.append(f"process {process.name()}{f', listening at {ports}' if ports else ''} is left")
            process.kill()
    found += [f"temporary {path.name} is left" for path in directory.iterdir()]
    found += [f"shared memory {path.name} is left" for path in unused(shm() - shared)]
    return found


def marked(mark: str) -> Iterator[psutil.Process]:
    """The processes of an injection that are alive. They inherit its mark at any remove."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
