"""The calls of all ranks of a torch program as one record per global operation. Needs no torch.

Sends have no order over all ranks, so they get one: a logical clock (Lamport 1978, "Time, clocks, and the ordering of
events in a distributed system"). A rank's send is one level above all that the rank has sent, received or waited for,
so that a message is always above what it depends on. Sends of one phase, group and level are one permute: what a
pipeline sends in one tick; and so are those of sibling groups in the same tick of each, whatever its level. A receive
counts where it is waited for, because it can be posted long before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from shardiff.program import Program
from shardiff.record import BITS, Executions, Record, num_bytes, record
from shardiff.tracing.calls import NO_CALLS, Call, Operation, Place, match_collectives, match_messages
from shardiff.tracing.steps import REST, SETUP, step_of


class MismatchError(ValueError):
    """Ranks disagree. disagreements: a line for each, naming both sides; records: what they agree on."""

    def __init__(self, disagreements: list[str], records: list[Record]) -> None:
        super().__init__("\n".join(["the ranks disagree:", *disagreements]))
        self.disagreements, self.records = disagreements, records


def merge(ranks: Sequence[Sequence[Call]]) -> list[Record]:
    """One record for each global operation, in causal order. ranks[r]: the calls of global rank r, in its order.

    Raises MismatchError where ranks disagree on op, dtype, bytes, shapes, root or order, or a call has no counterpart.
    In each group, and between each pair of ranks, only the first disagreement is reported, and what follows it there is
    not compared: the ranks have lost step.
    """
    records = [each for _, each in merge_steps(ranks)]
    if problems := disagreements(ranks):
        raise MismatchError(problems, records)
    return records


def disagreements(ranks: Sequence[Sequence[Call]]) -> list[str]:
    """A line for each, as `merge` reports them."""
    return match_collectives(ranks)[1] + match_messages(ranks)[2]


def merge_steps(ranks: Sequence[Sequence[Call]]) -> list[tuple[int, Record]]:
    """Of what the ranks agree on: the records in causal order, each with its step, as `steps.step_of` numbers them."""
    collectives, _ = match_collectives(ranks)
    sends, received, _ = match_messages(ranks)
    steps: dict[int, list[Operation]] = {}
    numbers = [step_of(calls) for calls in ranks]
    places = {id(operation): place for place, operation in reversed((collectives | sends).items())}
    for operation in in_causal_order(ranks, collectives | sends, received):
        rank, position = places[id(operation)]
        steps.setdefault(numbers[rank][position], []).append(operation)
    order = sorted(steps, key=lambda step: (step == REST, step))
    return [(step, each) for step in order for each in combine(steps[step])]


def program_of(ranks: Sequence[Sequence[Call]], label: str = "", alone: bool = False) -> Program:
    """What the ranks agree on, as a Program of the whole run, and of each of its segments: set-up, steps, rest.

    alone: what one rank sees, without the others, as `own_records` tells it.
    """
    found: dict[int, list[Record]] = {}
    told = [pair for calls in ranks for pair in own_steps(calls)] if alone else merge_steps(ranks)
    for step, each in told:
        found.setdefault(step, []).append(each)
    segments = {
        name: Program(tuple(collapse(records)), f"{label}, {name}" if label else name)
        for step, records in found.items()
        for name in ["set-up" if step == SETUP else "rest" if step == REST else f"step {step}"]
    }
    everything = collapse(each for records in found.values() for each in records)
    return Program(tuple(everything), label, segments=segments)


def in_causal_order(
    ranks: Sequence[Sequence[Call]], operations: dict[Place, Operation], received: dict[Place, Operation]
) -> list[Operation]:
    """Give every operation its level, and sort by it: plays the calls of all ranks through, each as far as it can go.

    A rank waits for what it received, and for the other ranks in a collective that is not asynchronous.
    """
    clock, position = [0] * len(ranks), [0] * len(ranks)
    complete: list[Operation] = []
    seen: set[Place] = set()

    def step(rank: int, patient: bool) -> bool:
        """Past this rank's next call, or False if it has to wait and is patient enough to."""
        place = rank, position[rank]
        call = ranks[rank][position[rank]]
        awaited = operations.get(place)
        if place not in seen:
            seen.add(place)
            clock[rank] += call.op == "send"
            if awaited:
                awaited.level = max(awaited.level, clock[rank])
                awaited.arrived += 1
                if awaited.arrived == len(awaited.calls):
                    complete.append(awaited)
        if call.op == "wait":
            of = rank, call.of or 0
            awaited = received.get(of) or operations.get(of)
        elif call.is_async:
            awaited = None
        if awaited:
            if awaited.arrived < len(awaited.calls) and patient:
                return False
            clock[rank] = max(clock[rank], awaited.level)
        position[rank] += 1
        return True

    while unfinished := [rank for rank, calls in enumerate(ranks) if position[rank] < len(calls)]:
        moved = False
        for rank in unfinished:
            while position[rank] < len(ranks[rank]) and step(rank, patient=True):
                moved = True
        if not moved:  # they wait for what never comes, which is reported already, or need not really wait
            for rank in unfinished:
                step(rank, patient=False)
    return sorted(complete, key=lambda operation: operation.level)


def combine(operations: Iterable[Operation]) -> list[Record]:
    """One record for each collective, that of sibling groups of a mesh being one, and for each tick's sends.

    Siblings may move different parameters: each stage of a pipeline reduces its own gradients. Their record names all.
    They may also run at different times, a ring inside one stage before that in the next: the k-th tick of each is one.
    """
    records: list[Record] = []
    details: list[dict[str, None]] = []  # of each record, in the order in which they came
    latest: dict[Any, int] = {}  # where the record is that a sibling may join
    times: Counter[Any] = Counter()
    ticks: dict[Any, tuple[int, int]] = {}  # of a group's sends: the latest level, and how many levels there were
    for operation in operations:
        call = operation.calls[0]
        if call.op == "barrier":
            continue
        if call.op == "send":
            new = sent_record(call)
            family = (call.axis, len(call.ranks)) if call.axis else (call.group, call.ranks)
            own = new.phase, new.dtype, call.group, call.ranks
            level, tick = ticks.get(own, (-1, 0))
            ticks[own] = operation.level, tick + (operation.level != level)
            key: Any = new.phase, new.dtype, ticks[own][1], family
        else:
            new = collective_record(operation.calls)
            each = replace(new, groups=None, detail=None)
            times[each, call.group, call.ranks] += 1
            key = each, times[each, call.group, call.ranks]
        at = latest.get(key)
        joined = None if at is None else join(records[at], new)
        if at is None or not joined:
            at = latest[key] = len(records)
            records.append(new)
            details.append({})
        else:
            records[at] = joined
        if new.detail:
            details[at][new.detail] = None
    return [replace(each, detail=listed(list(names))) for each, names in zip(records, details, strict=True)]


def listed(details: Sequence[str], most: int = 4) -> str | None:
    """What the groups of a record move, in one text; cut off where it is long."""
    more = [f"{len(details) - most} more"] if len(details) > most else []
    return "; ".join([*details[:most], *more]) or None


def join(a: Record, b: Record) -> Record | None:
    """Two records as one, or None if some rank is in both."""
    if a.groups and b.groups:
        ranks = [rank for group in (*a.groups, *b.groups) for rank in group]
        return replace(a, groups=tuple(sorted((*a.groups, *b.groups)))) if len(ranks) == len(set(ranks)) else None
    edges = tuple(sorted((*(a.edges or ()), *(b.edges or ()))))
    if any(len({edge[end] for edge in edges}) < len(edges) for end in (0, 1)):
        return None  # a permute gives each rank at most one message
    return replace(
        a,
        payload_bytes=max(a.payload_bytes, b.payload_bytes),
        wire_bytes=max(a.wire_bytes, b.wire_bytes),
        edges=edges,
        is_async=a.is_async or b.is_async,
        source=a.source or b.source,
    )


def collective_record(calls: Sequence[Call]) -> Record:
    """A collective: what the ranks need not agree on is that of the first, and the payload the largest."""
    call = calls[0]
    return record(
        call.op,
        call.dtype,
        max(call.payload_bytes for call in calls),
        len(call.ranks),
        axis=call.axis,
        groups=(call.ranks,),
        phase=call.phase,
        is_async=any(call.is_async for call in calls),
        source=call.source,
        flags=call.flags,
        parts=call.parts,
        reduction=call.reduction,
        detail=next((call.detail for call in calls if call.detail), None),
        root=call.ranks.index(call.peer) if call.peer in call.ranks else None,
        shape=call.shapes[0] if len(call.shapes) == 1 and is_payload(call) else None,
        moves=next((call.moves for call in calls if call.moves), None),
    )


def is_payload(call: Call) -> bool:
    """Whether the bytes of the one tensor that was passed are the payload; those of a gather's input are not."""
    return num_bytes(math.prod(call.shapes[0]), call.dtype) == call.payload_bytes if call.dtype in BITS else False


def sent_record(call: Call) -> Record:
    """A send as a permute of one edge."""
    assert call.peer is not None
    return record(
        "collective_permute",
        call.dtype,
        call.payload_bytes,
        None,
        axis=call.axis,
        edges=((call.rank, call.peer),),
        phase=call.phase,
        is_async=call.is_async,
        source=call.source,
        flags=call.flags,
        detail=call.detail,
    )


def own_records(calls: Sequence[Call]) -> list[Record]:
    """What one rank sees alone. A receive is a permute too, with no bytes on this rank's wire, flagged "received"."""
    return [each for _, each in own_steps(calls)]


def own_steps(calls: Sequence[Call]) -> list[tuple[int, Record]]:
    """The same, each with its step."""
    steps = step_of(calls)
    sources = {call.of: call.peer for call in calls if call.op == "wait"}
    records: list[tuple[int, Record]] = []
    for i, call in enumerate(calls):
        if call.op == "send":
            records.append((steps[i], sent_record(call)))
        elif call.op == "recv":
            peer = sources.get(i) if call.peer is None else call.peer
            got = sent_record(replace(call, rank=-1 if peer is None else peer, peer=call.rank))
            edges = None if peer is None else got.edges
            records.append((steps[i], replace(got, wire_bytes=0, edges=edges, flags=(*got.flags, "received"))))
        elif call.op not in (*NO_CALLS, "barrier"):
            records.append((steps[i], collective_record([call])))
    return records


def collapse(records: Iterable[Record]) -> list[Record]:
    """Equal records as one, with their executions added, at the place of the first: what a training loop repeats."""
    executions: dict[Record, Executions] = {}
    for each in records:
        key = replace(each, executions=Executions())
        executions[key] = executions[key] + each.executions if key in executions else each.executions
    return [replace(key, executions=times) for key, times in executions.items()]
