"""A program run in processes that are traced, and what is known of it afterwards. Needs no torch in this process."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shardiff.program import Program
from shardiff.ranks import silence
from shardiff.tracing import silent
from shardiff.tracing.calls import Call, last_of
from shardiff.tracing.link import serve
from shardiff.tracing.merge import disagreements, program_of
from shardiff.tracing.script import Launch, run
from shardiff.tracing.settings import STARTED, Settings
from shardiff.tracing.torchrun import exchange, shared, under_torchrun
from shardiff.tracing.verifier import Verdict

SILENCE, KEPT_WAITING = 300.0, 30.0  # seconds: the default limits, without and with verification
START = 60.0  # seconds that the processes have in any case to begin


@dataclass(frozen=True)
class Options:
    """What to do beside noting every call.

    verify: compare every call over the ranks before it blocks, and stop at the first that does not fit. strict: nor
    where ranks move different things. values: compare replicas bit by bit. timeout: with verify the seconds that a rank
    may keep others waiting, KEPT_WAITING by default; without it those for which all ranks may be idle and make no call,
    SILENCE by default. quiet: the program's standard output goes to standard error.
    """

    verify: bool = False
    strict: bool = False
    values: bool = False
    timeout: float | None = None
    quiet: bool = False


@dataclass(frozen=True)
class Traced:
    """status: the program's exit status, that of the first process to fail. verdict: why it was stopped, if it was.
    program: what its ranks agree on. errors: what is wrong, a line each; warnings: what may be; notes: what else a
    reader should know. raised: rank -> the error that ended it, where it is known, the first to fail first. calls: all,
    by rank."""

    status: int
    verdict: Verdict | None
    num_ranks: int
    program: Program
    errors: list[str]
    warnings: list[str]
    notes: list[str]
    raised: dict[int, str]
    calls: list[list[Call]]


def trace_program(
    kind: str, target: str, arguments: Sequence[str], nproc: int | None, options: Options, label: str
) -> Traced | int:
    """Run a program in so many processes as torchrun would, or as a rank of torchrun's in one.

    kind, target: as of Settings. nproc: 1 by default; 0 for one process as Python would start it, which starts ranks of
    its own. label: the Program's. Returns the status alone on a rank that rank 0 speaks for.
    """
    joined = under_torchrun()
    num_ranks = joined.world_size if joined else nproc or 1
    speaks = not joined or joined.rank == 0
    verify = options.verify or options.strict
    address, server = "", None
    with ExitStack() as stack:
        short = None if len(os.fsencode(tempfile.gettempdir())) < 70 else "/tmp"  # what fits into a socket's address
        directory = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="shardiff-", dir=short, ignore_cleanup_errors=True)
        )
        if verify and speaks:
            address = str(Path(directory, "verifier"))
            server = stack.enter_context(serve(address, num_ranks, options.timeout or KEPT_WAITING, options.strict))
        if verify and joined:
            address = shared(address)
        settings = Settings(directory, address, options.values, kind, target, tuple(arguments))
        watch = server or Silence(Path(directory), math.inf if verify else options.timeout or SILENCE)
        status, verdict = run(
            Launch(settings, None if joined else num_ranks if nproc != 0 else 0, options.quiet), watch
        )
        ranks = server.verifier.ranks() if server else read(Path(directory))
        unfollowed = untraced(Path(directory))
        errors = sorted(Path(directory).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
        raised = {int(path.stem): path.read_text() for path in errors}
        twice = watch.twice() if isinstance(watch, Silence) else []
    if joined and not verify:
        exchanged = exchange(ranks, num_ranks)
        if exchanged is None:
            return status
        ranks = exchanged
    if not speaks:
        return status
    ranks += [[] for _ in range(num_ranks - len(ranks))]
    found = [verdict.text] if verdict else disagreements(ranks)  # calls that had no time to be made are no disagreement
    suspicious = [] if verdict else silent.suspicions(ranks)
    wrong = [*found, *silent.differences(ranks), *(suspicious if options.strict else [])]
    notes = [*unfollowed, *twice, *silent.unbatched(ranks), *(f"not traced: {name}" for name in silent.unseen(ranks))]
    warnings = [] if options.strict else suspicious
    return Traced(status, verdict, len(ranks), program_of(ranks, label), wrong, warnings, notes, raised, ranks)


class Silence:
    """Looks on as files grow in a directory, and says so when none has for `timeout` seconds, and nobody works."""

    def __init__(self, directory: Path, timeout: float) -> None:
        self.directory, self.timeout = directory, timeout
        self.sizes: dict[Path, int] | None = None
        self.silence = silence.Silence(timeout, ())
        self.pids: set[int] = set()
        self.first: set[int] = set()
        self.began = time.monotonic()

    def started(self, pids: Sequence[int]) -> None:
        self.pids |= set(pids)
        self.first = set(pids)

    def twice(self) -> list[str]:
        """A line where several ranks were started, and not they have communicated but what each of them has started."""
        calls = {int(path.stem) for path in self.directory.glob("*.jsonl")}
        if len(self.first) < 2 or not calls or calls & self.first:
            return []
        return ["the script starts its own ranks, and has done so in each process that --nproc asks for: use --nproc 0"]

    def step(self, patience: float) -> Verdict | None:
        time.sleep(patience)
        if self.timeout == math.inf:
            return None
        sizes = {path: path.stat().st_size for path in self.directory.iterdir()}
        starting = not sizes and time.monotonic() < self.began + START  # it imports torch
        if sizes != self.sizes or starting:
            self.sizes = sizes
            self.pids |= {int(path.stem) for path in sizes if path.suffix == ".stack"}
            self.silence.pids = tuple(self.pids)
            self.silence.heard()
        working = time.monotonic() - self.silence.idle_since < 0.5 * self.timeout  # as long as it likes
        if not self.silence.over() or working:
            return None
        ranks = read(self.directory)
        texts = [f"rank {rank} (its last: {last_of(ranks, rank)})" for rank in range(len(ranks))]
        text = "; ".join([f"stuck: no call of any rank for {self.timeout:g} s", *texts])
        return Verdict("stuck", text, running=tuple(map(str, self.directory.glob("*.stack"))))

    def idle(self) -> bool:
        return True


def untraced(directory: Path) -> list[str]:
    """A line for each process that was started and not traced, and what would trace it."""
    lines = [line for path in sorted(directory.glob(f"*{STARTED}")) for line in path.read_text("utf-8").splitlines()]
    advice = "what it sent is not in here. To trace ranks, have shardiff start them: shardiff trace --nproc N SCRIPT"
    return [f"{line}; {advice}" for line in dict.fromkeys(lines)]


def read(directory: Path) -> list[list[Call]]:
    """The calls by rank, from what any number of processes wrote into `directory`."""
    ranks: dict[int, list[Call]] = {}
    for path in sorted(directory.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
        before = {rank: len(calls) for rank, calls in ranks.items()}  # by an earlier process of that rank
        for line in path.read_text().splitlines():
            with suppress(ValueError):  # the last line of a process that was killed
                call = Call.from_json(json.loads(line))
                of = None if call.of is None else call.of + before.get(call.rank, 0)
                ranks.setdefault(call.rank, []).append(replace(call, of=of))
    return [ranks.get(rank, []) for rank in range(max(ranks, default=-1) + 1)]
