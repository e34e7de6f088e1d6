"""When each operation of a compiled JAX program ran, from jax's own profiler (jax.profiler.ProfileData).

On CPU a collective, too, is an event from start to end in the process of its rank; what computes meanwhile hides it.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\(.*?(?:op_name=\"([^\"]*)\"|$)", re.MULTILINE
)
COLLECTIVES = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|send|recv)"
    r"(-start|-update|-done)?$"
)
CONTAINERS = ("while", "call", "conditional")  # their events only span those of what they contain
MARK = "shardiff iteration "


class Operation(NamedTuple):
    """One execution of one instruction. kind: "communication", or by its op_name "forward", "backward" or "other".

    Times are nanoseconds of time.perf_counter_ns, which all processes of a machine share.
    """

    name: str
    kind: str
    start: int
    end: int
    thread: int = 0


def kinds(hlo: str) -> dict[str, str]:
    """Instruction name -> kind, without containers, from optimized HLO text."""
    found = {}
    for name, opcode, op_name in INSTRUCTION.findall(hlo):
        if COLLECTIVES.match(opcode):
            found[name] = "communication"
        elif opcode not in CONTAINERS:
            found[name] = "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else "other"
    return found


def profile(act: Callable[[], Any], hlo: str, iterations: int) -> list[tuple[int, int, list[Operation]]]:
    """Run `act`, which must wait for what it starts, and give start, end and operations of each iteration."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 2
    begins = []
    with tempfile.TemporaryDirectory(prefix="shardiff-") as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            for iteration in range(iterations):
                begins.append(time.perf_counter_ns())
                with jax.profiler.TraceAnnotation(f"{MARK}{iteration}"):
                    act()
        file = next(Path(directory).rglob("*.xplane.pb"))
        return operations(jax.profiler.ProfileData.from_file(str(file)), kinds(hlo), begins)


def operations(data: Any, kind_of: dict[str, str], begins: Sequence[int]) -> list[tuple[int, int, list[Operation]]]:
    """The same from a ProfileData. begins: time.perf_counter_ns when each iteration began; it aligns the clocks.

    An event is the time for which a thread runs an operation. What the operation leaves to other threads, where a rank
    has several, is not seen; on one thread there is no such thing.
    """
    marks: dict[int, tuple[int, int]] = {}
    events: list[Operation] = []
    thread = 0
    for plane in data.planes:
        for line in plane.lines:
            count = len(events)
            for event in line.events:
                name, start, end = event.name, round(event.start_ns), round(event.end_ns)
                if name.startswith(MARK):
                    marks[int(name.removeprefix(MARK))] = (start, end)
                elif name in kind_of and any(key == "hlo_op" for key, _ in event.stats):
                    events.append(Operation(name, kind_of[name], start, end, thread))
            thread += len(events) > count
    result = []
    for iteration, begin in enumerate(begins):
        first, last = marks[iteration]
        shift = begin - first
        mine = [e for e in events if first <= e.start < last]
        moved = [o._replace(start=o.start + shift, end=o.end + shift) for o in mine]
        result.append((first + shift, last + shift, sorted(moved, key=lambda o: o.start)))
    return result


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of intervals."""
    total, reached = 0, None
    for start, end in sorted(intervals):
        if reached is None or end > reached:
            total += end - (start if reached is None else max(start, reached))
            reached = end
    return total


def exposed(ops: Iterable[Operation]) -> int:
    """Nanoseconds in which a collective ran and nothing was computed."""
    ops = list(ops)
    computing = [(o.start, o.end) for o in ops if o.kind != "communication"]
    return covered((o.start, o.end) for o in ops) - covered(computing)
