"""JAX programs compiled by the real device's compiler: beside those for a target that is not there, and run as one rank
of many."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from benchmarks.documents.figures import spread
from benchmarks.gpu.sizes import Sizes, mocked, of_one
from contract.strategy import Run
from shardiff.compiling.hardware import has_compiler, parse
from shardiff.record import Record, totals

TARGET = "h200"
KINDS = ("argument", "output", "temp", "alias")
WARM_UP = 2


def one_device(sizes: Sizes, keep: Any) -> None:
    """Steps of one rank, for this device and for the target."""
    from shardiff.ranks.jax_devices import devices, prepare

    prepare(1, sizes.device)
    found: list[dict[str, Any]] = []
    for implementation, axes in of_one():
        run = Run(implementation, axes, replace(sizes.step, dtype="float32"), microbatches=2)
        found.append(compare(run, devices(1, sizes.device), 1))
        keep({"programs": found})


def one_of_many(sizes: Sizes, keep: Any) -> None:
    """One rank of a program of many: what its compiler makes of it beside the target, and the time of its steps.

    On a GPU, jax's mock topology has hosts of one GPU each, of which this process is the first. Collectives do nothing
    there, so that what is timed is a rank's own work. On the CPU all ranks are in this process, and collectives work.
    """
    from benchmarks.gpu.jax_programs import arguments, compile_step, time_step
    from jax_impl.jax_versions import mock_hosts
    from shardiff.ranks.jax_devices import devices, prepare

    ranks = sizes.mocked
    if sizes.device == "cuda":
        mock_hosts(ranks)
    prepare(ranks, sizes.device)
    found: list[dict[str, Any]] = []
    timed: list[dict[str, Any]] = []
    for implementation, axes in mocked(ranks):
        run = Run(implementation, axes, replace(sizes.step, dtype="bfloat16"), microbatches=2)
        lowered, compiled = compile_step(run, devices(ranks, sizes.device))
        found.append(compare(run, devices(ranks, sizes.device), ranks, compiled))
        keep({"programs": found, "ranks": timed})
        seconds = time_step(compiled, arguments(lowered, compiled), sizes.iterations, WARM_UP)
        timed.append({**words(run), "ranks": ranks, "step_seconds": spread(seconds)})
        keep({"programs": found, "ranks": timed})


def compare(run: Run, devices: Any, ranks: int, compiled: Any = None) -> dict[str, Any]:
    """The whole step compiled for `devices` and for as many of the target: communication, memory, seconds."""
    from jax_impl.compiled import job
    from shardiff import compiling, hlo

    start = time.perf_counter()
    if compiled is None:
        from benchmarks.gpu.jax_programs import compile_step

        _, compiled = compile_step(run, devices)
    seconds = time.perf_counter() - start
    # Hosts of one GPU each, as jax's mock topology has them.
    target = parse((f"{TARGET}:{ranks}x1" if ranks > 1 else f"{TARGET}:1") if has_compiler("gpu") else f"cpu:{ranks}")
    (absent,) = compiling.compile_all([job(run, target, update=True)], "highest")
    here, there = (hlo.read(text).records for text in (compiled.as_text(), absent.hlo))
    plan = compiled.memory_analysis()
    planned = {kind: getattr(plan, f"{kind}_size_in_bytes") for kind in KINDS} if plan else {}
    of_target = dict(zip(KINDS, (asdict(absent.memory)[name] for name in MEMORY), strict=True))
    return {
        **words(run),
        "device": devices[0].device_kind,
        "target": str(target),
        "differences": differences(here, there),
        "wire_bytes": [totals(records)["wire_bytes"]["max"] for records in (here, there)],
        "memory": {kind: [planned.get(kind), of_target[kind]] for kind in KINDS},
        "seconds": [seconds, absent.seconds],
    }


MEMORY = ("arguments", "outputs", "temporaries", "aliased")  # KINDS, as shardiff names them


def words(run: Run) -> dict[str, Any]:
    """A run as rows name it."""
    return {
        "implementation": run.implementation,
        "strategy": run.strategy,
        "mesh": str(run.mesh),
        "dtype": run.problem.dtype,
    }


def differences(here: Iterable[Record], there: Iterable[Record]) -> list[str]:
    """A line for each kind of collective that one program has more often than the other."""
    ours, theirs = (Counter(map(said, records)) for records in (here, there))
    return [
        f"{what}: {ours[what]} here, {theirs[what]} for the target"
        for what in sorted(ours.keys() | theirs.keys())
        if ours[what] != theirs[what]
    ]


def said(record: Record) -> str:
    """What a collective moves, in words."""
    times = record.executions
    runs = f"{times.min}" if times.min == times.max else f"{times.min} to {times.max}"
    return f"{record.op} of {record.payload_bytes} bytes {record.dtype} over {record.group_size} ranks, {runs} times"
