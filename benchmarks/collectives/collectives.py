"""Every collective of both frameworks timed in one run: `plan` says what to measure, `run` measures it.

For each world size, the rank processes of both frameworks are alive at once and take turns, each with a block of all
payloads of one op, so that slow changes of the machine affect both alike. The document is saved after every block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.collectives.floor import floor
from benchmarks.collectives.numbers import fits, flat, rows
from benchmarks.collectives.timing import IDENTITIES, ITEMSIZE, METHOD, lengths, whole
from benchmarks.documents import resume
from benchmarks.documents.collectives import OPS
from benchmarks.pools import workers
from shardiff.ranks.verdict import WorkerError
from shardiff.system import machine
from shardiff.system.memory import PROCESS

IMPLEMENTATIONS = ("torch", "jax")
UNITS = {"": 1, "B": 1} | {
    f"{p}{b}": (1024 if b == "iB" else 1000) ** e for e, p in enumerate("KMG", 1) for b in ("B", "iB")
}
IDENTITY_PAYLOAD = 1 << 16  # bytes

Document = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to measure. sizes: payloads in bytes. device: cpu or cuda. budget: seconds for one size and mode."""

    ops: tuple[str, ...]
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    implementations: tuple[str, ...]
    device: str
    iterations: int
    budget: float
    bare: bool

    @property
    def memory(self) -> int:
        """Bytes that are needed at least: in each process, what goes in, what comes out and what should come out."""
        payload, most = max(self.sizes), max(self.ranks)
        values = max(n + 2 * out for n, out in (lengths(op, payload, most) for op in self.ops))
        return most * (PROCESS + ITEMSIZE * values)

    @property
    def num_blocks(self) -> int:
        """How many blocks there are, with those of the identities."""
        return len(self.blocks()) + len(self.ranks) * len(self.implementations)

    def blocks(self) -> list[tuple[int, str, str]]:
        """(ranks, op, implementation) in turns: who goes first alternates."""
        return [
            (ranks, op, implementation)
            for ranks in self.ranks
            for i, op in enumerate(self.ops)
            for implementation in self.implementations[:: -1 if i % 2 else 1]
        ]


def plan(
    ops: Sequence[str] | None,
    ranks: Sequence[int] | None,
    sizes: Sequence[str | int],
    implementations: Sequence[str] | None,
    device: str = "auto",
    iterations: int = 20,
    budget: float = 10.0,
    bare: bool = False,
) -> Plan:
    """A Plan, or ValueError in one line. None means all ops, 2 and 4 ranks, both implementations."""
    names = {"op": ops or tuple(OPS), "implementation": implementations or IMPLEMENTATIONS}
    counts = tuple(dict.fromkeys(ranks or (2, 4)))
    for name, known in (("op", tuple(OPS)), ("implementation", IMPLEMENTATIONS)):
        for value in names[name]:
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}; known: {', '.join(known)}")
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; known: auto, cpu, cuda")
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if not 0 < budget < float("inf"):
        raise ValueError(f"budget must be a number of seconds above 0, got {budget}")
    most = max(counts)
    if min(counts) < 1 or most > 64:
        raise ValueError(f"ranks must be 1 to 64, got {most if most > 64 else min(counts)}")
    payloads = tuple(sorted({parse_size(size) for size in sizes}))
    if payloads[0] < ITEMSIZE * most:
        raise ValueError(f"{most} ranks need a payload of at least {ITEMSIZE * most} bytes, got {payloads[0]}")
    gpus = machine.num_gpus() if device != "cpu" else 0
    if device == "cuda" and gpus < most:
        raise ValueError(f"device cuda needs a GPU for each rank: {most} ranks, {gpus} GPUs; try --device cpu")
    where = "cuda" if gpus >= most else "cpu"
    unique = {name: tuple(dict.fromkeys(given)) for name, given in names.items()}
    return Plan(unique["op"], counts, payloads, unique["implementation"], where, iterations, budget, bare)


def sweep(smallest: str, largest: str) -> list[int]:
    """Payloads in bytes from the smallest on, each 4 times the one before, up to the largest."""
    first, last = parse_size(smallest), parse_size(largest)
    if last < first:
        raise ValueError(f"--max {largest} is smaller than --min {smallest}")
    sizes = [first]
    while sizes[-1] * 4 <= last:
        sizes.append(sizes[-1] * 4)
    return sizes


def parse_size(text: str | int) -> int:
    """Bytes of "4KiB", "100 MB" (decimal), "1024"."""
    found = re.fullmatch(r"(\d+) *([A-Za-z]*)", str(text).strip())
    if not found or found[2].replace("k", "K") not in UNITS or int(found[1]) == 0:
        raise ValueError(f"a size is a number of bytes as in 4KiB, 16MiB, 100MB or 4096, got {str(text)!r}")
    return int(found[1]) * UNITS[found[2].replace("k", "K")]


def begin(todo: Plan) -> Document:
    """The document before anything is measured: plain JSON types, whose keys stay."""
    return {
        "kind": "collectives",
        "schema": 1,
        "machine": machine.facts(),
        "method": list(METHOD),
        "settings": {
            **asdict(todo),
            "transport": "gloo over loopback" if todo.device == "cpu" else "NCCL",
            "threads_per_rank": {str(ranks): machine.threads(ranks) for ranks in todo.ranks},
        },
        "complete": False,
        "runs": [],
        "floor": None,
        "rows": [],
        "fits": [],
        "identities": [],
        "flat": None,
    }


def run(
    todo: Plan,
    save: Callable[[Document], object] = lambda d: None,
    starting: Callable[[str], object] = lambda s: None,
    timeout: float = 30.0,
    kept: Document | None = None,
) -> Document:
    """Measure. save: called with the document so far after every block; starting: with the name of what comes next;
    timeout: seconds after which idle and silent ranks count as stuck; kept: an interrupted run's document, whose
    blocks are not measured again. Raises WorkerError, which names the block.
    """
    document = begin(todo)
    resume.begin(document, kept)
    starting("memory copy and loopback")
    document["floor"] = kept["floor"] if kept else floor(todo.ranks)
    for ranks in todo.ranks:
        blocks = [(f"{name} {op} on {ranks} ranks", name, op) for n, op, name in todo.blocks() if n == ranks]
        blocks += [(f"{name} identities on {ranks} ranks", name, None) for name in todo.implementations]
        missing = {name for label, name, _ in blocks if not resume.has(kept, label)}
        with ExitStack() as stack:
            call = {name: _pool(name, ranks, todo, timeout, stack) for name in todo.implementations if name in missing}
            for label, name, op in blocks:
                key = "rows" if op else "identities"
                if kept and resume.has(kept, label):
                    of = name, ranks, op
                    rows_of = (one for one in kept[key] if (one["implementation"], one["ranks"], one.get("op")) == of)
                    document[key] += rows_of
                else:
                    starting(label)
                    document[key] += _measure(todo, label, call[name], name, ranks, op)
                    resume.measured(document, label)
                document["fits"] = fits(document["rows"])
                document["flat"] = flat(document["rows"], document["machine"]["cores"])
                save(document)
    document["complete"] = True
    save(document)
    return document


def _measure(
    todo: Plan, label: str, call: Callable[..., list[Any]], name: str, ranks: int, op: str | None
) -> list[Document]:
    """The rows of one block: of all payloads of an op, or of the identities."""
    if op:
        sizes = sorted({whole(size, ranks) for size in todo.sizes})
        return rows(
            name, op, ranks, _call(label, call, name, "block", op, sizes, todo.iterations, todo.budget, todo.bare)
        )
    payload, found = whole(IDENTITY_PAYLOAD, ranks), []
    by_rank = _call(label, call, name, "identities", payload)
    for identity in IDENTITIES:
        worst = max(one[identity] for one in by_rank)
        fields = {"implementation": name, "ranks": ranks, "identity": identity, "bytes": payload}
        found.append({**fields, "max_difference": worst, "holds": worst == 0})
    return found


def _pool(implementation: str, ranks: int, todo: Plan, timeout: float, stack: ExitStack) -> Callable[..., list[Any]]:
    """The function that calls a function on all ranks of a framework, whose processes end with `stack`."""
    return stack.enter_context(workers(implementation, ranks, todo.device, timeout)).call


def _call(label: str, call: Callable[..., list[Any]], implementation: str, *args: Any) -> list[Any]:
    """What a function of the framework's module gives on each rank."""
    try:
        return call(on_torch if implementation == "torch" else on_jax, *args)
    except WorkerError as error:
        raise WorkerError(f"{label}: {str(error).strip()}") from error


def on_torch(device: Any, function: str, *args: Any) -> Any:
    """On a rank, which imports its own framework only."""
    from benchmarks.collectives import torch as collectives_torch
    from shardiff.ranks.rank import report_phase

    report_phase(args[0] if function == "block" else function)
    return getattr(collectives_torch, function)(device, *args)


def on_jax(function: str, *args: Any) -> Any:
    """On a rank, which imports its own framework only."""
    from benchmarks.collectives import jax as collectives_jax
    from shardiff.ranks.rank import report_phase

    report_phase(args[0] if function == "block" else function)
    return getattr(collectives_jax, function)(*args)
