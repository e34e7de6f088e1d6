"""How often the computations of an HLO program run.

A computation runs as often as the instructions that call it: once per call or fusion, trips times for the body of a
while loop and trips + 1 times for its condition, 0 to 1 times for the branch of a conditional.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from shardiff.hlo.errors import HloError, shown
from shardiff.hlo.instruction import Instruction, instruction, names
from shardiff.hlo.loops import Site, trip_count
from shardiff.hlo.text import COMMENT, NAME, Program, Statement
from shardiff.record import Executions

ONCE, MAYBE, UNKNOWN = Executions(1, 1), Executions(0, 1), Executions(0, None)
MAX_COUNT = 2**53  # beyond this a count is as good as unknown, and JSON readers lose digits
IS_SYNC = re.compile(r'"is_sync":\s*true')
BRANCHES = ("true_computation", "false_computation", "branch_computations")
NAME_LIST = re.compile(rf"(?:\s|{COMMENT})*(?:\{{(?:{COMMENT}|[^}}])*|%?{NAME})?", re.S)
NAMES = re.compile(NAME)
CALLEES = ("body", "condition", *BRANCHES, "calls", "to_apply", "called_computations")


@dataclass(frozen=True)
class Call:
    """One instruction that calls a computation: from where, how often each time, for an asynchronous start or not."""

    caller: str
    callee: str
    site: Instruction
    times: Executions
    is_async: bool


@dataclass(frozen=True)
class Flow:
    """How often the computations run that ENTRY reaches, which of them an async start runs, and who calls them."""

    executions: dict[str, Executions]
    asynchronous: set[str]
    callers: dict[str, list[Call]]


def is_synchronous(site: Instruction) -> bool:
    """Whether a start says of itself that nothing overlaps it."""
    return IS_SYNC.search(site.backend_config) is not None


def follow_calls(program: Program, sites: list[tuple[str, Statement]], holders: set[str]) -> Flow:
    """The flow from ENTRY to `holders`, the computations with collectives. `sites`: the statements that may call.

    Raises HloError if a called computation is missing, or if one calls itself.
    """
    # Only what leads to a collective is read in full, and a superset of that is found by a glance at each statement.
    mentions: dict[str, list[int]] = defaultdict(list)
    for number, (_, statement) in enumerate(sites):
        for name in mentioned(program.text, statement):
            mentions[name].append(number)
    missing = [name for name in mentions if name not in program.computations]
    queue, leading = deque([*holders, *missing]), {*holders, *missing}
    chosen = set()
    while queue:
        for number in mentions.get(queue.popleft(), ()):
            chosen.add(number)
            caller = sites[number][0]
            if caller not in leading:
                leading.add(caller)
                queue.append(caller)
    called: dict[str, list[Site]] = defaultdict(list)
    for caller, statement in (sites[number] for number in sorted(chosen)):
        site = instruction(program.text, statement)
        for callee, role in callees(site):
            if callee not in program.computations:
                raise HloError(f"computation {shown(callee)} is called but not in the text: a part is missing")
            called[callee].append(Site(caller, site, role))
    leading -= set(missing)
    callers: dict[str, list[Call]] = {name: [] for name in leading}
    calls: dict[str, list[Call]] = defaultdict(list)
    for callee in leading:
        for caller, site, role in called[callee]:
            is_async = site.opcode.endswith("-start") and not is_synchronous(site)
            call = Call(caller, callee, site, times(program, called, caller, site, role), is_async)
            callers[callee].append(call)
            calls[caller].append(call)

    # Kahn's order: a computation is settled once every caller is.
    executions = {program.entry: ONCE}
    asynchronous: set[str] = set()
    waiting = {name: len(found) for name, found in callers.items()}
    ready = deque(name for name, count in waiting.items() if count == 0)
    while ready:
        name = ready.popleft()
        for call in calls[name]:
            if name in executions:
                before = executions.get(call.callee, Executions(0, 0))
                executions[call.callee] = capped(before + executions[name] * call.times)
                if call.is_async or name in asynchronous:
                    asynchronous.add(call.callee)
            waiting[call.callee] -= 1
            if waiting[call.callee] == 0:
                ready.append(call.callee)
    if stuck := [name for name, count in waiting.items() if count]:
        raise HloError(f"computation {shown(min(stuck))} calls itself")
    reached = {name: [call for call in found if call.caller in executions] for name, found in callers.items()}
    return Flow(executions, asynchronous, reached)


def mentioned(text: str, statement: Statement) -> Iterator[str]:
    """The names of all computations that a statement calls, and perhaps some words that are none."""
    for key in ("calls=", "to_apply=", "body=", "condition=", "computation=", "computations="):
        found = text.find(key, statement.start, statement.end)
        while found >= 0:
            found += len(key)
            yield from NAMES.findall(NAME_LIST.match(text, found)[0])  # type: ignore[index]
            found = text.find(key, found, statement.end)


def capped(count: Executions) -> Executions:
    """The same count with max None where it is beyond MAX_COUNT."""
    most = None if count.max is None or count.max > MAX_COUNT else count.max
    return Executions(min(count.min, MAX_COUNT), most)


def callees(site: Instruction) -> Iterator[tuple[str, str]]:
    """(computation, role) of what an instruction calls; the role is an attribute's name."""
    for role in CALLEES:
        if role in site.attributes:
            for name in names(site.attributes[role]):
                yield name, role


def times(program: Program, called: dict[str, list[Site]], caller: str, site: Instruction, role: str) -> Executions:
    """How often one execution of `site` runs the computation that it calls in this role."""
    if role in BRANCHES:
        return MAYBE
    if site.opcode == "custom-call":  # what a custom call does with a computation is its own affair
        return UNKNOWN
    if role not in ("body", "condition"):
        return ONCE
    count = trip_count(program, called, caller, site)
    trips = UNKNOWN if count is None or count > MAX_COUNT else Executions(count, count)
    return trips + ONCE if role == "condition" else trips
