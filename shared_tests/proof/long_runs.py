"""`make long`: 1,000 steps of every strategy. Memory, files and sockets stay flat, and the result equals the reference.

Every rank records what it holds about every tenth step. The first quarter is for warming up. After it, files and
sockets must be the same at every look, and the median memory (RSS) of the last quarter may be above that of the second
by no more than ALLOWANCE plus what the run keeps on purpose, the digest of every parameter after every step. A step
that leaked one activation, 8 KiB in float64, would be at twice ALLOWANCE after the 500 steps in between. In JAX all
ranks are one process.

The tolerance is that of the suite, `contract.proof.LIMITS`, after 1,000 steps as after 3, and for AdamW in torch also
what its weight decay adds: torch multiplies a parameter by 1 - lr * weight_decay, rounded once to the parameter's
dtype, and the same error in every step adds up (in float32 to 1.36e-5 after 1,000 steps, which is the error of the
parameters; the gradients there and their first moment follow). NumPy's reference and optax subtract the decay instead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from contract import proof, reference
from contract.axes import AXES, one_axis
from contract.optimizer import AdamW
from contract.problem import Problem
from contract.strategy import IMPLEMENTATIONS, Run, RunResult
from shardiff.ranks import jax_devices as devices
from shardiff.ranks.supervisor import Workers
from shardiff.ranks.torch_pool import workers
from shardiff.system import files, machine
from shared_tests.looks import Look, looking
from shared_tests.on_ranks import train_looking

ALLOWANCE = 2 << 20  # bytes: what allocators and the collector of cycles may move by
FOLLOWS = 3  # times the parameters' error from decay: the most that another claim was seen to be off by is 2.2 times
SIZES = {"batch": 16, "width": 64, "layers": 4}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shared_tests.proof.long_runs", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--strategy", choices=tuple(AXES), action="append", help="default: all")
    parser.add_argument("--dtype", choices=tuple(proof.LIMITS), action="append", help="default: float64 and float32")
    parser.add_argument("--output", type=Path, help="write the result to this file as JSON")
    options = parser.parse_args()
    devices.prepare(2, "cpu")
    rows, console = [], Console()
    with workers(2, "cpu") as pool:
        for dtype in options.dtype or proof.LIMITS:
            for run in plan(options.strategy or tuple(AXES), dtype, options.steps):
                rows.append(row := measure(run, pool))
                console.print(f"{title(run)}: {row['seconds']:.1f} s; {'; '.join(row['failures']) or 'holds'}")
    if options.output:
        files.write(options.output, {"rows": rows, "allowance_bytes": ALLOWANCE, "machine": machine.facts()})
    Console(width=140).print(table(rows))
    console.print(machine.summary(machine.facts()), soft_wrap=True)
    return 1 if any(row["failures"] for row in rows) else 0


def plan(strategies: Sequence[str], dtype: str, steps: int) -> list[Run]:
    """One run of every implementation and strategy, on two ranks."""
    return [
        Run(
            side,
            one_axis(strategy, 1 if strategy == "single_device" else 2),
            Problem(dtype=dtype, **SIZES),
            "adamw",
            steps,
        )
        for strategy in strategies
        for side in IMPLEMENTATIONS
    ]


def measure(run: Run, pool: Workers) -> dict[str, Any]:
    """The run's row: its errors, what each process held, and a line for each thing that does not hold."""
    started = time.monotonic()
    result, looks = execute(run, pool)
    seconds = time.monotonic() - started
    errors, allowed = proof.distances(result, reference_of(run)), tolerance(run)
    wrong = [*proof.wrong_shards(run, result), *proof.differing_replicas(run, result)]
    wrong += [f"{claim}: {e:.2g}, at most {allowed:.2g} allowed" for claim, e in errors.items() if not e <= allowed]
    kept = sum(map(recorded_bytes, result.shards)) / len(looks)
    held = [process_row(each, kept) for each in looks]
    return {
        "run": title(run),
        "steps": run.steps,
        "seconds": seconds,
        "errors": errors,
        "tolerance": allowed,
        "processes": held,
        "failures": [*wrong, *(line for i, one in enumerate(held) for line in not_flat(i, one))],
    }


def execute(run: Run, pool: Workers) -> tuple[RunResult, list[list[Look]]]:
    """The run's result, and what each of its processes recorded."""
    every = max(1, run.steps // 100)
    if run.implementation == "torch":
        from torch_impl import train

        ranks = pool.call(train_looking, run, every, world_size=run.world_size)
        return train.assemble(run, [result for result, _ in ranks]), [looks for _, looks in ranks]
    from jax_impl import train

    with looking(train, every) as looks:
        return train.run(run), [looks]


def tolerance(run: Run) -> float:
    """How far the run may be from the reference; see the module's docstring."""
    limit = proof.LIMITS[run.problem.dtype]
    if run.implementation != "torch" or run.optimizer != "adamw":
        return limit
    kept = 1 - Fraction(AdamW().lr) * Fraction(AdamW().weight_decay)
    rounded = Fraction(float(np.dtype(run.problem.dtype).type(1 - AdamW().lr * AdamW().weight_decay)))
    return limit + FOLLOWS * run.steps * abs(float(rounded - kept))


REFERENCES: dict[tuple[Problem, str, int], RunResult] = {}


def reference_of(run: Run) -> RunResult:
    """The reference's result, which is the same for all implementations, strategies and dtypes."""
    key = Problem(**SIZES), run.optimizer, run.steps
    if key not in REFERENCES:
        REFERENCES[key] = reference.run(run)
    return REFERENCES[key]


def recorded_bytes(shards: dict[str, Any]) -> int:
    """What a rank's digests take: for each step a dict, and for each parameter a string."""
    steps = max(len(shard.digests) for shard in shards.values())
    return steps * (sys.getsizeof(dict(shards)) + len(shards) * sys.getsizeof("0" * 16))


def process_row(looks: Sequence[Look], kept: float) -> dict[str, Any]:
    """What one process held, after the first quarter; kept: bytes of results by the end."""
    quarter = len(looks) // 4
    second, last, after = looks[quarter : 2 * quarter], looks[-quarter:], looks[quarter:]
    growth = statistics.median(look.rss for look in last) - statistics.median(look.rss for look in second)
    slope = statistics.linear_regression([look.step for look in after], [look.rss for look in after]).slope
    return {
        "rss_bytes": statistics.median(look.rss for look in last),
        "growth_bytes": growth,
        "bytes_a_step": slope,
        "allowed_growth_bytes": ALLOWANCE + kept / 2,  # between the middles of the two quarters lies half the run
        "files": sorted({look.files for look in after}),
        "sockets": sorted({look.sockets for look in after}),
        "looks": len(after),
    }


def not_flat(process: int, row: dict[str, Any]) -> list[str]:
    """A line for each quantity that is not flat."""
    lines = []
    if row["growth_bytes"] > row["allowed_growth_bytes"]:
        lines.append(f"process {process} grew by {row['growth_bytes']:.0f} of {row['allowed_growth_bytes']:.0f} bytes")
    for name in ("files", "sockets"):
        if len(row[name]) > 1:
            lines.append(f"process {process} had {row[name][0]} to {row[name][-1]} {name}")
    return lines


def title(run: Run) -> str:
    return f"{run.implementation} {run.strategy} {run.mesh} {run.problem.dtype} {run.optimizer}"


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line for each run: the largest error of any claim, and the process that grew most."""
    shown = Table(box=SIMPLE_HEAD)
    for name in ("run", "error", "at most", "MiB", "KiB grown", "B a step", "files", "sockets"):
        shown.add_column(name, no_wrap=True)
    for row in rows:
        most = max(row["processes"], key=lambda process: process["growth_bytes"])
        shown.add_row(
            row["run"], f"{max(row['errors'].values()):.1e}", f"{row['tolerance']:.1e}",
            f"{most['rss_bytes'] / 2**20:.0f}", f"{most['growth_bytes'] / 2**10:.0f}", f"{most['bytes_a_step']:.0f}",
            str(most["files"][-1]), str(most["sockets"][-1]),
        )  # fmt: skip
    return shown


if __name__ == "__main__":
    sys.exit(main())
