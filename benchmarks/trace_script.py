"""`shardiff trace`: run any torch script in N processes as torchrun would, and show what they communicate."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.diff_view import size
from benchmarks.machine import cores
from contract.communication import PHASES, Record, totals
from torch_impl.trace_calls import Call, ranks_text
from torch_impl.trace_merge import MismatchError, collapse, merge

if TYPE_CHECKING:
    from rich.table import Table

GRACE = 10.0  # seconds that the other processes have to end when one has failed


def refusal(script: Path, nproc: int | None) -> str | None:
    """Why this cannot be traced, in one line; None if it can."""
    if nproc is not None and nproc < 1:
        return f"nproc must be at least 1, got {nproc}"
    if not script.is_file():
        return f"{script}: {'is a directory' if script.is_dir() else 'no such file'}"
    if not os.access(script, os.R_OK):
        return f"{script}: cannot be read"
    if "RANK" in os.environ and not under_torchrun():
        return "RANK is set, but not by torchrun: unset it, or start shardiff by torchrun"
    if under_torchrun() and nproc not in (None, int(os.environ["WORLD_SIZE"])):
        return f"torchrun has started {os.environ['WORLD_SIZE']} processes already, so nproc cannot be {nproc}"
    return None


def under_torchrun() -> bool:
    """Whether this process is one of those that torchrun started, with a store that they can all reach."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "RANK" in os.environ


def show(script: Path, arguments: Sequence[str], nproc: int | None, as_json: bool) -> int:
    """Run, print, and return the exit status: the script's; 1 if the ranks disagree; 130 or 143 if interrupted.

    Under torchrun each process runs its rank of the script, and rank 0 prints for all.
    """
    joined = under_torchrun()
    num_ranks = int(os.environ["WORLD_SIZE"]) if joined else nproc or 1
    with tempfile.TemporaryDirectory(prefix="shardiff-", ignore_cleanup_errors=True) as directory:
        status = run(script, arguments, None if joined else num_ranks, directory, as_json)
        ranks = read(Path(directory))
    if joined:
        ranks = exchange(ranks, num_ranks)
    if ranks is None:
        return status
    ranks += [[] for _ in range(num_ranks - len(ranks))]
    try:
        records, disagreements = merge(ranks), []
    except MismatchError as error:
        records, disagreements = error.records, error.disagreements
    records = collapse(records)
    program = shlex.join([str(script), *arguments])
    if as_json:
        document = {
            "program": program,
            "ranks": len(ranks),
            "records": [record.to_json() for record in records],
            "totals": totals(records),
            "disagreements": disagreements,
        }
        print(json.dumps(document, indent=2))
    else:
        view(program, len(ranks), records, disagreements)
    return status or (1 if disagreements else 0)


def run(script: Path, arguments: Sequence[str], nproc: int | None, directory: str, as_json: bool) -> int:
    """Run the script to its end in nproc processes, or in one with the environment as it is if nproc is None.

    Each notes its calls in `directory`. Returns the status of the first process to fail, else 0; 130 or 143 if ended
    by SIGINT or SIGTERM. as_json: standard output is taken, so the script's goes to standard error.
    """
    root = str(Path(__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {root!r}); from torch_impl.trace_process import main; main()"
    command = [sys.executable, "-c", code, directory]
    processes: list[subprocess.Popen[bytes]] = []
    ended: list[int] = []

    def interrupt(signum: int, frame: object) -> None:
        ended.append(signum)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with store_socket(nproc) as (fd, port):
            for rank in range(nproc or 1):
                fds = () if rank or fd < 0 else (fd,)
                processes.append(
                    subprocess.Popen(
                        [*command, str(*fds or (-1,)), str(script), *arguments],
                        env=os.environ if nproc is None else os.environ | environment(rank, nproc, port),
                        stdin=None if nproc == 1 else subprocess.DEVNULL,
                        stdout=sys.stderr if as_json else None,
                        pass_fds=fds,
                        start_new_session=True,  # Ctrl-C comes here only, and what a rank starts can be ended
                    )
                )
        return wait(processes)
    except KeyboardInterrupt:
        return 128 + (signal.SIGTERM if ended else signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
        end(processes)


@contextmanager
def store_socket(nproc: int | None) -> Iterator[tuple[int, int]]:
    """The file descriptor and port of a socket for the ranks' store: on loopback only, and no one can take the port."""
    if nproc is None:
        yield -1, 0
        return
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        yield server.fileno(), server.getsockname()[1]


def environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """What torchrun sets (pytorch.org/docs/stable/elastic/run.html), and loopback for what the ranks send."""
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    variables: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": nproc,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "shardiff",
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", max(1, cores() // nproc)),
        **{f"{backend}_SOCKET_IFNAME": name for name in loopback for backend in ("GLOO", "NCCL")},
    }
    return {name: str(value) for name, value in variables.items()}


def wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, but not long once one has failed. Its status, after saying which it was; else 0."""
    status, deadline = 0, float("inf")
    while time.monotonic() < deadline:
        running = [process for process in processes if process.poll() is None]
        failed = [(rank, process.returncode) for rank, process in enumerate(processes) if process.returncode]
        if failed and not status:
            rank, code = failed[0]
            status, deadline = code if code > 0 else 128 - code, time.monotonic() + GRACE
            how = f"with status {code}" if code > 0 else f"by signal {signal.Signals(-code).name}"
            print(f"shardiff: the script ended {how} on rank {rank}", file=sys.stderr)
        if not running:
            break
        time.sleep(0.02)
    return status


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that still run, with what they started."""
    running = [process for process in processes if process.poll() is None]
    for kind, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)


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


def exchange(mine: Sequence[Sequence[Call]], num_ranks: int, seconds: float = 60) -> list[list[Call]] | None:
    """Under torchrun: on rank 0 the calls of all ranks, by way of torchrun's store; on the others None.

    A rank whose calls do not come within this time is said to be missing, and has none.
    """
    from torch.distributed import DistStoreError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    rank, address, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))
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
        console.print(table(records))
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


def table(records: Sequence[Record]) -> Table:
    """One line a record, in phases."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    what = ["what"] if any(record.detail for record in records) else []
    for name in ("phase", "op", "dtype", "payload", "wire", "group", "times", "async", "source", *what):
        right = name in ("payload", "wire", "times")
        result.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right)
    for phase in PHASES:
        shown = [record for record in records if record.phase == phase]
        for i, r in enumerate(shown):
            result.add_row(
                "" if i else phase,
                r.op,
                r.dtype,
                size(r.payload_bytes),
                size(r.wire_bytes),
                group_text(r),
                f"{r.executions.max:,}",
                "yes" if r.is_async else "",
                escape(r.source or ""),
                *[escape(r.detail or "") for _ in what],
                end_section=i == len(shown) - 1,
            )
    return result


def group_text(record: Record, most: int = 4) -> str:
    """Who takes part: tp 0-3; dp 0,2 1,3; 0>1 1>2. Cut off where it is long."""
    if record.edges is not None:
        texts = [f"{a}>{b}" for a, b in record.edges]
    else:
        texts = [
            f"{group[0]}-{group[-1]}"
            if len(group) > 2 and len(group) == group[-1] - group[0] + 1
            else ",".join(map(str, group))
            for group in record.groups or ()
        ]
    more = [f"... {len(texts) - most} more"] if len(texts) > most else []
    return " ".join([*([record.axis] if record.axis else []), *texts[:most], *more])
