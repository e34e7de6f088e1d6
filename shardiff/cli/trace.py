"""`shardiff trace`: run any torch script in N processes as torchrun would, and show what they communicate."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from shardiff.diff.record_view import table
from shardiff.record import SCHEMA, Record, totals
from shardiff.system import torchrun
from shardiff.system.words import size
from shardiff.tracing.calls import Call, last_of, ranks_text
from shardiff.tracing.link import serve
from shardiff.tracing.merge import MismatchError, collapse, merge
from shardiff.tracing.script import Launch, run
from shardiff.tracing.verifier import Verdict

STATUS = {"mismatch": 1, "deadlock": 1, "stuck": 3}


def refusal(script: Path, nproc: int | None, verify: bool = False, timeout: float | None = None) -> str | None:
    """Why this cannot be traced, in one line; None if it can."""
    if nproc is not None and nproc < 1:
        return f"nproc must be at least 1, got {nproc}"
    if not script.is_file():
        return f"{script}: {'is a directory' if script.is_dir() else 'no such file'}"
    if not os.access(script, os.R_OK):
        return f"{script}: cannot be read"
    try:
        here = under_torchrun()
    except ValueError as error:
        return str(error)
    if "RANK" in os.environ and not here:
        return "RANK is set, but not by torchrun: unset it, or start shardiff by torchrun"
    if here and nproc not in (None, here.world_size):
        return f"torchrun has started {here.world_size} processes already, so nproc cannot be {nproc}"
    if timeout is not None and not 0 < timeout < math.inf:
        return f"timeout must be a number of seconds above 0, got {timeout}"
    if verify and here and here.world_size != here.local_world_size:
        return "verify needs all processes on one machine, and torchrun has others elsewhere"
    return None


def under_torchrun() -> torchrun.Started | None:
    """This process's place among those that torchrun started, which have a store that they can all reach; else None."""
    here = torchrun.started()
    return here if here and here.has_store else None


def show(
    script: Path, arguments: Sequence[str], nproc: int | None, as_json: bool, verify: bool, timeout: float | None
) -> int:
    """Run, print, and return the exit status: the script's; 1 if the ranks disagree; 3 if they were stuck; 130 or 143
    if interrupted.

    verify: every call, before it blocks. timeout: seconds that a rank may keep others waiting, by default 30; without
    verify, seconds without a call of any rank, by default any number. Under torchrun each process runs its rank of the
    script, and rank 0 prints for all.
    """
    joined = under_torchrun()
    num_ranks = joined.world_size if joined else nproc or 1
    speaks = not joined or joined.rank == 0
    address, server = "", None
    with ExitStack() as stack:
        short = None if len(os.fsencode(tempfile.gettempdir())) < 70 else "/tmp"  # what fits into a socket's address
        directory = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="shardiff-", dir=short, ignore_cleanup_errors=True)
        )
        if verify and speaks:
            address = str(Path(directory, "verifier"))
            server = stack.enter_context(serve(address, num_ranks, timeout or 30))
        if verify and joined:
            address = shared(address)
        launch = Launch(script, arguments, None if joined else num_ranks, directory, address, as_json)
        status, verdict = run(launch, server or Silence(Path(directory), math.inf if verify else timeout or math.inf))
        ranks = server.verifier.ranks() if server else read(Path(directory))
    if joined and not verify:
        ranks = exchange(ranks, num_ranks)
    if not speaks or ranks is None:
        return status
    ranks += [[] for _ in range(num_ranks - len(ranks))]
    try:
        records, disagreements = merge(ranks), []
    except MismatchError as error:
        records, disagreements = error.records, error.disagreements
    if verdict:  # calls that had no time to be made are no disagreement
        disagreements = [verdict.text]
    records = collapse(records)
    program = shlex.join([str(script), *arguments])
    if as_json:
        document = {
            "schema": SCHEMA,
            "program": program,
            "ranks": len(ranks),
            "records": [record.to_json() for record in records],
            "totals": totals(records),
            "disagreements": disagreements,
        }
        print(json.dumps(document, indent=2))
    else:
        view(program, len(ranks), records, disagreements)
    return status or (STATUS[verdict.kind] if verdict else 1 if disagreements else 0)


class Silence:
    """Looks on as files grow in a directory, and says so when none has for `timeout` seconds."""

    def __init__(self, directory: Path, timeout: float) -> None:
        self.directory, self.timeout = directory, timeout
        self.sizes, self.since = {}, math.inf

    def step(self, patience: float) -> Verdict | None:
        time.sleep(patience)
        if self.timeout == math.inf:
            return None
        now, sizes = time.monotonic(), {path: path.stat().st_size for path in self.directory.iterdir()}
        if sizes != self.sizes:
            self.sizes, self.since = sizes, now
        if now - self.since <= self.timeout:
            return None
        ranks = read(self.directory)
        texts = [f"rank {rank} (its last: {last_of(ranks, rank)})" for rank in range(len(ranks))]
        text = "; ".join([f"stuck: no call of any rank for {self.timeout:g} s", *texts])
        return Verdict("stuck", text, running=tuple(map(str, self.directory.glob("*.stack"))))

    def idle(self) -> bool:
        return True


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


def torchruns_store(seconds: float) -> Any:
    """The store that all of torchrun's processes can reach; it waits so long for what is not there."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))


def shared(address: str) -> str:
    """Under torchrun: the verifier's address, which rank 0 has and gives to all."""
    store = torchruns_store(60)
    if address:
        store.set("shardiff/verifier", address)
    return store.get("shardiff/verifier").decode()


def exchange(mine: Sequence[Sequence[Call]], num_ranks: int, seconds: float = 60) -> list[list[Call]] | None:
    """Under torchrun: on rank 0 the calls of all ranks, by way of torchrun's store; on the others None.

    A rank whose calls do not come within this time is said to be missing, and has none.
    """
    from torch.distributed import DistStoreError  # pyright: ignore[reportPrivateImportUsage]

    rank, store = int(os.environ["RANK"]), torchruns_store(seconds)
    store.set(f"shardiff/{rank}", json.dumps([call.to_json() for calls in mine for call in calls]))
    if rank:
        return None
    ranks: list[list[Call]] = []
    for other in range(num_ranks):
        try:
            ranks.append([Call.from_json(fields) for fields in json.loads(store.get(f"shardiff/{other}"))])
        except DistStoreError:
            print(f"shardiff: nothing came from rank {other}", file=sys.stderr)
            ranks.append([])
    return ranks


def view(program: str, num_ranks: int, records: Sequence[Record], disagreements: Sequence[str]) -> None:
    """Print a table for people."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    if records:
        console.print(table(records, by_rank=True))
    sums = totals(records)
    calls, payload, wire = (sums[key]["max"] for key in ("calls", "payload_bytes", "wire_bytes"))
    console.print(
        f"{program}, {ranks_text(range(num_ranks))}: {calls:,} call{'s' * (calls != 1)}, {size(payload)} payload, "
        f"{size(wire)} that a rank must send",
        markup=False,
    )
    if disagreements:
        console.print("[bold red]The ranks disagree:[/]")
    for line in disagreements:
        console.print(line, markup=False)
