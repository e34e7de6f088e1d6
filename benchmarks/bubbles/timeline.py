"""Timelines of pipeline stages: the bubble in them, what the schedule alone would give, and traces for Perfetto.

All times are nanoseconds of time.perf_counter_ns, CLOCK_MONOTONIC on Linux: one clock for all processes of a machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.documents.bubbles import BUSY, Event
from contract.schedule import Action, Schedule
from contract.schedule_time import play


def span(events: Sequence[Event]) -> tuple[int, int]:
    """From the first start of an action to the last end, over all ranks: what the bubble is a share of."""
    busy = [e for e in events if e.kind in BUSY]
    return min(e.start for e in busy), max(e.end for e in busy)


def bubble(events: Sequence[Event]) -> float:
    """Idle stage-time over total stage-time: the share of the span, of all ranks together, in which no action runs."""
    start, end = span(events)
    ranks = {e.rank for e in events}
    work = sum(e.end - e.start for e in events if e.kind in BUSY)
    return 1 - work / (len(ranks) * (end - start))


def durations(events: Sequence[Event]) -> dict[Action, int]:
    """Action -> nanoseconds."""
    return {Action(e.kind, e.rank, e.chunk, e.microbatch or 0): e.end - e.start for e in events if e.kind in BUSY}


def replay(schedule: Schedule, taken: Mapping[Action, int]) -> list[Event]:
    """The schedule with actions as long as they were and communication for nothing: every action starts as soon as its
    stage is free and the neighbour that it needs is done. Its bubble is the schedule's own, weighted by durations."""
    return [
        Event(action.stage, action.kind, action.microbatch, start, end, chunk=action.chunk)
        for action, (start, end) in sorted(play(schedule, taken).items(), key=lambda played: played[1])
    ]


def idle(events: Sequence[Event], rank: int) -> list[tuple[int, int]]:
    """The intervals of the span in which a rank runs no action."""
    start, end = span(events)
    gaps = []
    for e in sorted((e for e in events if e.rank == rank and e.kind in BUSY), key=lambda e: e.start):
        if e.start > start:
            gaps.append((start, e.start))
        start = max(start, e.end)
    return [*gaps, (start, end)] if end > start else gaps


def from_zero(events: Sequence[Event]) -> list[Event]:
    """The same with the earliest start at 0."""
    first = min(e.start for e in events)
    return [e._replace(start=e.start - first, end=e.end - first) for e in events]


def label(event: Event) -> str:
    """F0, B3; another event's own name, or its kind."""
    if event.kind in BUSY and event.microbatch is not None:
        return str(Action(event.kind, event.rank, event.chunk, event.microbatch))
    return event.name or event.kind


def chrome_trace(timelines: Mapping[str, Sequence[Event]]) -> dict[str, Any]:
    """Title -> events as Chrome's trace format, which Perfetto opens: a process for each title, a thread for each rank.

    Microseconds; "X" is a complete event, "M" names a process or thread (Trace Event Format, Google 2016).
    """
    records: list[dict[str, Any]] = []
    for pid, (title, events) in enumerate(timelines.items()):
        records.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": title}})
        records.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
        for rank in sorted({e.rank for e in events}):
            args = {"name": f"rank {rank}"}
            records.append({"ph": "M", "pid": pid, "tid": rank, "name": "thread_name", "args": args})
        for e in from_zero(events):
            place = {"pid": pid, "tid": e.rank, "ts": e.start / 1e3, "dur": (e.end - e.start) / 1e3}
            args = {} if e.microbatch is None else {"microbatch": e.microbatch}
            records.append({"ph": "X", "name": label(e), "cat": e.kind, **place, "args": args})
    return {"traceEvents": records, "displayTimeUnit": "ms"}
