"""What `shardiff diff` does: the three columns of a diff, from a real run, from a compiler, and from a formula."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.comm_diff import Row, align, step_bytes, unexplained
from contract import cost
from contract.communication import Record, totals
from contract.strategy import AXES, Run

MOST_TRACED = 16  # ranks that a laptop can run; for more, the explicit side is its closed form


@dataclass(frozen=True)
class Diff:
    """One strategy on one target. traced: whether `explicit` was traced in a run of as many ranks; else, the formula.

    memory: bytes of one device as the compiler planned them, by kind.
    """

    run: Run
    target: str
    explicit: list[Record]
    traced: bool
    derived: list[Record]
    closed_form: list[Record]
    memory: dict[str, int]
    rows: list[Row]

    @property
    def extra_bytes(self) -> int:
        """Wire bytes that a rank sends beyond what was written; negative if less."""
        return step_bytes(self.derived) - step_bytes(self.explicit)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        own_formula = cost.communication(self.run)
        return {
            "strategy": self.run.strategy,
            "implementation": self.run.implementation,
            "target": self.target,
            "mesh": {AXES[self.run.strategy] or "one": self.run.degree},
            "explicit": {**side(self.explicit), "traced": self.traced},
            "derived": {**side(self.derived), "memory": self.memory},
            "closed_form": {**side(self.closed_form), "implementation_totals": totals(own_formula)},
            "rows": [row.to_json() for row in self.rows],
            "unexplained": unexplained(self.rows),
        }


def side(records: Sequence[Record]) -> dict[str, Any]:
    """Records and their totals, in plain JSON types."""
    return {"records": [record.to_json() for record in records], "totals": totals(records)}


def compute(
    runs: Sequence[tuple[Run, Any]], precision: str = "default", progress: Callable[[str], None] = lambda _: None
) -> list[Diff]:
    """The diffs of these (run, target) pairs, in their order. Compiles while it traces.

    Raises ValueError for what cannot be compiled, WorkerError if a rank of a traced run fails.
    """
    from jax_impl import hlo, targets

    explicit_runs = list(dict.fromkeys(replace(run, implementation="torch") for run, _ in runs))
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(trace_all, [run for run in explicit_runs if run.degree <= MOST_TRACED], progress)
        progress(f"compiling for {', '.join(dict.fromkeys(str(target) for _, target in runs))}")
        compiled = targets.compile_all(runs, precision)
        traced = pending.result()
    diffs = []
    for (run, target), result in zip(runs, compiled, strict=True):
        written = replace(run, implementation="torch")
        closed_form = cost.communication(written)
        explicit = traced.get(written, closed_form)
        axis = AXES[run.strategy]
        derived = [replace(r, axis=axis) if r.group_size != 1 else r for r in hlo.read(result.hlo).collectives]
        diffs.append(
            Diff(
                run,
                str(target),
                explicit,
                written in traced,
                derived,
                closed_form,
                asdict(result.memory),
                align(explicit, derived),
            )
        )
    return diffs


def trace_all(runs: Sequence[Run], progress: Callable[[str], None]) -> dict[Run, list[Record]]:
    """What each explicit run communicates in one step, traced in real processes."""
    from torch_impl.launch import workers
    from torch_impl.trace import trace_run

    if not runs:
        return {}
    records = {}
    with workers(max(run.degree for run in runs), "cpu") as pool:
        for run in runs:
            progress(f"tracing {run.strategy} on {run.degree} ranks")
            records[run] = trace_run(replace(run, device="cpu"), pool)
    return records


def read_records(path: Path) -> tuple[str, list[Record]]:
    """The records in an output of `shardiff trace --json` or `shardiff hlo --json`.

    Returns what the records are of, and them. Raises ValueError, one line that names the file, for anything else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: not the JSON of one program, as shardiff trace or hlo print with --json") from None
    for key, of in (("collectives", "module"), ("records", "program")):
        if isinstance(data, dict) and isinstance(data.get(key), list):
            try:
                return str(data.get(of) or path), [Record.from_json(fields) for fields in data[key]]
            except (TypeError, ValueError, AttributeError, KeyError) as error:
                raise ValueError(f"{path}: {key} has an entry that is no record: {error}") from None
    raise ValueError(f"{path}: has neither records nor collectives; give an output of shardiff trace or hlo --json")
