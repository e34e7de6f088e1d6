"""A pipeline's schedule as the planner replays it: with the times of its passes and messages, thousands of times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from contract.schedule import Schedule, make
from contract.strategy import Run

What = tuple[int, str]  # a chunk of a stage, and a kind of pass


class Beat(NamedTuple):
    """One action: its stage, what it does, as its number in `kinds`, the beat whose result it needs, or -1, and the
    link on which its own result goes to another stage, or -1."""

    stage: int
    kind: int
    needs: int
    link: int


@dataclass(frozen=True)
class Timetable:
    """beats: every action after what it needs. kinds: all that is done. parts: into how many the model is cut; held:
    those of each stage. links: (from, to) stages. counts: for each stage, how often it does what.

    chain: the longest chain of passes and messages up to the end of the first stage, if all passes of a kind take as
    long, and a backward pass twice as long as a forward pass: how often it has what, and how many messages. With other
    times another chain may be longer, but this one takes its time in any case.
    """

    beats: tuple[Beat, ...] = ()
    kinds: tuple[What, ...] = ()
    parts: int = 1
    held: tuple[tuple[int, ...], ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    counts: tuple[Mapping[What, int], ...] = ()
    chain: Mapping[What, int] | None = None
    messages: int = 0

    @property
    def stages(self) -> int:
        return len(self.counts)


def timetable(run: Run) -> Timetable:
    """Of the pipeline of a run; empty without one."""
    stages = run.size("pipeline_parallel")
    return _timetable(run.schedule, stages, run.microbatches, run.chunks) if stages > 1 else Timetable()


@lru_cache(256)
def _timetable(name: str, stages: int, microbatches: int, chunks: int) -> Timetable:
    schedule = make(name, stages, microbatches, chunks)
    links = {pair: i for i, pair in enumerate(sorted({(s, t) for s, t in neighbours(schedule)}))}
    counts = tuple(Counter((a.chunk, a.kind) for a in order) for order in schedule.orders)
    kinds = tuple(sorted({what for each in counts for what in each}))
    beats = tuple(ordered(schedule, links, kinds))
    held = tuple(tuple(i for i, (at, _) in enumerate(schedule.parts) if at == stage) for stage in range(stages))
    table = Timetable(beats, kinds, len(schedule.parts), held, tuple(links), counts)
    small = 1e-6

    def end(longer: What | None = None, message: float = 0.0) -> float:
        times = {what: (2.0 if what[1] == "backward" else 1.0) + small * (what == longer) for what in kinds}
        return replay(table, [times] * stages, [(message, 0.0)] * len(links))[0]

    whole = end()
    chain = {what: round((end(what) - whole) / small) for what in kinds}
    return replace(table, chain=chain, messages=round((end(None, small) - whole) / small))


def neighbours(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """The (from, to) stages between which results go, both ways."""
    for (a, _), (b, _) in zip(schedule.parts, schedule.parts[1:], strict=False):
        if a != b:
            yield from ((a, b), (b, a))


def ordered(schedule: Schedule, links: Mapping[tuple[int, int], int], kinds: tuple[What, ...]) -> Iterator[Beat]:
    """All actions, each after those that it needs."""
    numbers = {what: i for i, what in enumerate(kinds)}
    part = {place: i for i, place in enumerate(schedule.parts)}
    last = len(schedule.parts) - 1
    done: dict[tuple[bool, int, int], int] = {}  # (whether forward, part, microbatch) -> the beat that made it
    at, count, moved = [0] * schedule.stages, 0, True
    while moved:
        moved = False
        for stage, order in enumerate(schedule.orders):
            while at[stage] < len(order):
                kind, _, chunk, microbatch = order[at[stage]]
                here, forward = part[stage, chunk], kind == "forward"
                needs, link = -1, -1
                if kind != "backward_weight":
                    source, target = (here - 1, here + 1) if forward else (here + 1, here - 1)
                    if 0 <= source <= last:
                        if (forward, source, microbatch) not in done:
                            break
                        needs = done[forward, source, microbatch]
                    if 0 <= target <= last and schedule.parts[target][0] != stage:
                        link = links[stage, schedule.parts[target][0]]
                    done[forward, here, microbatch] = count
                yield Beat(stage, numbers[chunk, kind], needs, link)
                count, at[stage], moved = count + 1, at[stage] + 1, True


def replay(
    table: Timetable, times: Sequence[Mapping[What, float]], messages: Sequence[tuple[float, float]]
) -> list[float]:
    """When each stage has ended its last pass.

    times: of each stage, the seconds of what it does. messages: of each link, how long a message takes on it, one after
    the other, and how long it is on its way after that.
    """
    free, links = [0.0] * table.stages, [0.0] * len(table.links)
    there: list[float] = []
    arrive = there.append
    lasting = [[each.get(what, 0.0) for what in table.kinds] for each in times]
    for stage, kind, needs, link in table.beats:
        start = free[stage]
        if needs >= 0 and (ready := there[needs]) > start:
            start = ready
        free[stage] = end = start + lasting[stage][kind]
        if link >= 0:
            sending, way = messages[link]
            busy = links[link]
            links[link] = busy = (busy if busy > end else end) + sending
            arrive(busy + way)
        else:
            arrive(end)
    return free
