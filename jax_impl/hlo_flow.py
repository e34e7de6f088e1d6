"""How often the computations of an HLO program run, and which phase of a training step its instructions belong to.

A computation runs as often as the instructions that call it: once per call or fusion, trips times for the body of a
while loop and trips + 1 times for its condition, 0 to 1 times for the branch of a conditional. Trips come from
`known_trip_count`; where text has none (TPU), from the counter's start, step and bound.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from contract.communication import Executions

from .hlo_text import HloError, Instruction, Program, Statement, display, instruction, split

ONCE, UNKNOWN = Executions(1, 1), Executions(0, None)
MAX_COUNT = 2**53  # beyond this a count is as good as unknown, and JSON readers lose digits
TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d{1,18})"?')
IS_SYNC = re.compile(r'"is_sync":\s*true')
TRANSPARENT = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "broadcast", "optimization-barrier")
FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "EQ": "EQ", "NE": "NE"}
CALLEE_ATTRIBUTES = ("calls", "to_apply", "called_computations")
BRANCH_ATTRIBUTES = ("true_computation", "false_computation", "branch_computations")
FUEL = 200  # instructions looked at for one loop; a longer chain of arithmetic leaves its trips unknown


@dataclass(frozen=True)
class Call:
    """One instruction that calls a computation: from where, how often each time, for an asynchronous start or not."""

    caller: str
    callee: str
    site: Instruction
    times: Executions
    is_async: bool = False


@dataclass(frozen=True)
class Flow:
    """How often computations run and whether an async start runs them, of those that ENTRY reaches; who calls them."""

    executions: dict[str, Executions]
    is_async: dict[str, bool]
    callers: dict[str, list[Call]]


def config(site: Instruction) -> str:
    """The backend's configuration as JSON text; older text has it as an escaped string."""
    return site.attributes.get("backend_config", "").replace('\\"', '"')


def is_synchronous(site: Instruction) -> bool:
    """Whether a start says of itself that nothing overlaps it."""
    return IS_SYNC.search(config(site)) is not None


def names(value: str) -> list[str]:
    """`%f` and `{%f, %g}` alike."""
    return [name.lstrip("%") for name in split(value.strip("{}"))]


def follow_calls(program: Program, sites: list[tuple[str, Statement]], holders: set[str]) -> Flow:
    """The flow from ENTRY to `holders`, the computations with collectives. `sites`: the statements that may call.

    Raises HloError if a called computation is missing, or if one calls itself.
    """
    edges: dict[str, list[tuple[str, Instruction, str]]] = defaultdict(list)
    for caller, statement in sites:
        site = instruction(program.text, statement)
        for callee, role in callees(site):
            if callee not in program.computations:
                raise HloError(f"computation {display(callee)} is called but not in the text: a part is missing")
            edges[callee].append((caller, site, role))

    # Only what leads to a collective: the rest of the program need not be looked into.
    queue, leading = deque(holders), set(holders)
    while queue:
        for caller, _, _ in edges[queue.popleft()]:
            if caller not in leading:
                leading.add(caller)
                queue.append(caller)
    callers: dict[str, list[Call]] = {name: [] for name in leading}
    calls: dict[str, list[Call]] = defaultdict(list)
    single = {name: sites[0] for name, sites in edges.items() if len({id(site) for _, site, _ in sites}) == 1}
    for callee in leading:
        for caller, site, role in edges[callee]:
            is_async = site.opcode.endswith("-start") and not is_synchronous(site)
            call = Call(caller, callee, site, times(program, single, caller, site, role), is_async)
            callers[callee].append(call)
            calls[caller].append(call)

    # Kahn's order: a computation is settled once every caller is.
    executions = {program.entry: ONCE}
    asynchronous = {program.entry: False}
    waiting = {name: len(found) for name, found in callers.items()}
    ready = deque(name for name, count in waiting.items() if count == 0)
    while ready:
        name = ready.popleft()
        for call in calls[name]:
            if name in executions:
                before = executions.get(call.callee, Executions(0, 0))
                executions[call.callee] = capped(before + executions[name] * call.times)
                asynchronous[call.callee] = asynchronous.get(call.callee, False) or call.is_async or asynchronous[name]
            waiting[call.callee] -= 1
            if waiting[call.callee] == 0:
                ready.append(call.callee)
    if stuck := [name for name, count in waiting.items() if count]:
        raise HloError(f"computation {display(min(stuck))} calls itself")
    return Flow(executions, asynchronous, callers)


def capped(count: Executions) -> Executions:
    """The same count with max None where it is beyond MAX_COUNT."""
    if count.max is not None and count.max > MAX_COUNT:
        return Executions(min(count.min, MAX_COUNT), None)
    return Executions(min(count.min, MAX_COUNT), count.max)


def callees(site: Instruction) -> Iterator[tuple[str, str]]:
    """(computation, role) of what an instruction calls: role is an attribute's name."""
    if site.opcode.endswith(("-done", "-update")):  # they name what their start already called
        return
    for role in ("body", "condition", *BRANCH_ATTRIBUTES, *CALLEE_ATTRIBUTES):
        if role in site.attributes:
            for name in names(site.attributes[role]):
                yield name, role


def times(program: Program, single: dict, caller: str, site: Instruction, role: str) -> Executions:
    """How often one execution of `site` runs the computation that it calls in this role."""
    if role in BRANCH_ATTRIBUTES:
        return Executions(0, 1)
    if site.opcode == "custom-call":  # what a custom call does with a computation is its own affair
        return UNKNOWN
    if role not in ("body", "condition"):
        return ONCE
    trips = trip_count(program, single, caller, site)
    return trips + ONCE if role == "condition" else trips


# Trip counts. A scalar is understood as base + offset: base is None for a constant, else (parameter number, tuple index)
# of the computation that it stands in, index None where the parameter is no tuple.

Base = tuple[int, int | None] | None
Scalar = tuple[Base, int]


def trip_count(program: Program, single: dict, caller: str, site: Instruction) -> Executions:
    """How often a while loop's body runs: as annotated, else derived, else (0, None)."""
    if annotated := TRIP_COUNT.search(config(site)):
        return Executions(int(annotated[1]), int(annotated[1]))
    bodies, conditions = names(site.attributes.get("body", "")), names(site.attributes.get("condition", ""))
    if len(bodies) != 1 or len(conditions) != 1 or not {bodies[0], conditions[0]} <= program.computations.keys():
        return UNKNOWN
    body, condition = bodies[0], conditions[0]
    fuel = [FUEL]
    test = comparison(program, condition, program.index(condition).root, fuel)
    if test is None:
        return UNKNOWN
    direction, left, right = test
    if step_of(program, body, left, fuel) == 0:
        direction, left, right = FLIPPED[direction], right, left
    step = step_of(program, body, left, fuel)
    if left[0] is None or not step or step_of(program, body, right, fuel) != 0 or not site.operands:
        return UNKNOWN
    start = constant(program, single, caller, site.operands[0], left[0][1], fuel)
    bound = right[1]
    if right[0] is not None:
        init = constant(program, single, caller, site.operands[0], right[0][1], fuel)
        bound = None if init is None else init + right[1]
    if start is None or bound is None:
        return UNKNOWN
    trips = count_trips(direction, start + left[1], bound, step)
    return UNKNOWN if trips is None or trips > MAX_COUNT else Executions(trips, trips)


def count_trips(direction: str, start: int, bound: int, step: int) -> int | None:
    """Trips of `for (i = start; i <direction> bound; i += step)`, None if it would not end."""
    if direction == "EQ":
        return 1 if start == bound else 0
    if direction == "NE":
        trips, rest = divmod(bound - start, step)
        return None if rest or trips < 0 else trips
    if direction in ("GT", "GE"):
        start, bound, step = -start, -bound, -step
    if direction in ("LE", "GE"):
        bound += 1
    if start >= bound:
        return 0
    return None if step < 0 else -(-(bound - start) // step)


def comparison(program: Program, computation: str, name: str, fuel: list[int]) -> tuple[str, Scalar, Scalar] | None:
    """(direction, left, right) of a loop's condition, seen through a fusion or a call around the comparison."""
    outer: list[tuple[str, Instruction]] = []
    while fuel[0] > 0:
        fuel[0] -= 1
        site = program.instruction(computation, name)
        if site is None:
            return None
        if site.opcode == "compare" and len(site.operands) == 2:
            sides = [scalar(program, computation, operand, None, fuel) for operand in site.operands]
            for caller, call in reversed(outer):
                sides = [through(program, caller, call, side, fuel) for side in sides]
            direction = site.attributes.get("direction", "")
            if None in sides or direction not in FLIPPED:
                return None
            return direction, sides[0], sides[1]  # type: ignore[return-value]
        if site.opcode in ("copy", "bitcast") and site.operands:
            name = site.operands[0]
        elif site.opcode in ("fusion", "call") and (found := list(callees(site))) and found[0][0] in program.computations:
            outer.append((computation, site))
            computation = found[0][0]
            name = program.index(computation).root
        else:
            return None
    return None


def through(program: Program, caller: str, call: Instruction, value: Scalar | None, fuel: list[int]) -> Scalar | None:
    """A scalar of a called computation, in terms of its caller."""
    if value is None or value[0] is None:
        return value
    number, index = value[0]
    if number >= len(call.operands):
        return None
    outside = scalar(program, caller, call.operands[number], index, fuel)
    return None if outside is None else (outside[0], outside[1] + value[1])


def scalar(program: Program, computation: str, name: str, index: int | None, fuel: list[int]) -> Scalar | None:
    """An instruction's value (of its tuple, element `index`) as base + offset, None if it is anything else."""
    offset = 0
    while fuel[0] > 0:
        fuel[0] -= 1
        site = program.instruction(computation, name)
        if site is None:
            return None
        if site.opcode == "constant":
            value = re.fullmatch(r"-?\d{1,18}", site.argument.strip())
            return (None, offset + int(value[0])) if value else None
        if site.opcode == "parameter":
            number = re.fullmatch(r"\d{1,6}", site.argument.strip())
            return ((int(number[0]), index), offset) if number else None
        if not site.operands:
            return None
        if site.opcode == "get-tuple-element" and index is None:
            position = re.fullmatch(r"\d{1,6}", site.attributes.get("index", ""))
            if not position:
                return None
            name, index = site.operands[0], int(position[0])
        elif site.opcode == "tuple" and index is not None and index < len(site.operands):
            name, index = site.operands[index], None
        elif site.opcode in TRANSPARENT:
            name = site.operands[0]
        elif site.opcode in ("add", "subtract") and len(site.operands) == 2:
            sides = [scalar(program, computation, operand, None, fuel) for operand in site.operands]
            left, right = sides
            if left is None or right is None:
                return None
            if right[0] is None:
                return left[0], offset + left[1] + (right[1] if site.opcode == "add" else -right[1])
            if left[0] is None and site.opcode == "add":
                return right[0], offset + left[1] + right[1]
            return None
        elif site.opcode in ("fusion", "call") and (found := list(callees(site))) and found[0][0] in program.computations:
            inside = scalar(program, found[0][0], program.index(found[0][0]).root, index, fuel)
            if inside is None or inside[0] is None:
                return None if inside is None else (None, offset + inside[1])
            number, index = inside[0]
            if number >= len(site.operands):
                return None
            name, offset = site.operands[number], offset + inside[1]
        else:
            return None
    return None


def step_of(program: Program, body: str, value: Scalar, fuel: list[int]) -> int | None:
    """What one trip adds to a scalar of the loop's state: 0 for a constant and for what the body hands through."""
    if value[0] is None:
        return 0
    after = scalar(program, body, program.index(body).root, value[0][1], fuel)
    return after[1] if after and after[0] == value[0] else None


def constant(program: Program, single: dict, computation: str, name: str, index: int | None, fuel: list[int]) -> int | None:
    """An integer that is the same whenever the computation runs; it may come from callers, through loops unchanged."""
    offset = 0
    while fuel[0] > 0:
        value = scalar(program, computation, name, index, fuel)
        if value is None or value[0] is None:
            return None if value is None else offset + value[1]
        if computation not in single:
            return None
        caller, site, role = single[computation]
        if role not in ("body", "condition", "calls", "to_apply"):
            return None
        if role in ("body", "condition"):
            bodies = names(site.attributes.get("body", ""))
            if bodies[:1] == [] or bodies[0] not in program.computations or step_of(program, bodies[0], value, fuel) != 0:
                return None
        number, index = value[0]
        if number >= len(site.operands):
            return None
        computation, name, offset = caller, site.operands[number], offset + value[1]
        # value[1] is added once: whatever lies between is a copy
    return None


# Phases.

UPDATE = re.compile(r"(?:^|[/(])(?:optimizer|optax|adam|sgd|apply_updates|apply_gradients|update(?=$|[/)]))", re.I)
MAX_CALLERS = 16  # levels of calls to look for a name in
MOVES_DATA = ("copy", "bitcast", "reshape", "transpose", "convert", "concatenate", "pad", "slice", "tuple", "get-tuple-element")
ORDER = {"": 0, "forward": 1, "backward": 2, "update": 3}


def named_phase(op_name: str) -> str:
    """What an op_name says, "" if nothing: JAX wraps a backward computation in transpose(), a linearized one in jvp()."""
    if "transpose(" in op_name:
        return "backward"
    if "jvp(" in op_name:
        return "forward"
    return "update" if UPDATE.search(op_name) else ""


class Phases:
    """Phases of instructions: by name, else by what they read, else by who reads them, else by who calls them."""

    def __init__(self, program: Program, flow: Flow):
        self.program, self.flow = program, flow
        self.inherited: dict[str, tuple[dict[str, str], dict[str, str]]] = {}

    def of(self, computation: str, site: Instruction) -> str:
        """The phase of a collective; what its own computation does not tell, the instruction that calls it may."""
        for _ in range(MAX_CALLERS):
            if phase := self.within(computation, site):
                return phase
            calls = self.flow.callers.get(computation, [])
            if len(calls) != 1:
                break
            computation, site = calls[0].caller, calls[0].site
        return "other"

    def within(self, computation: str, site: Instruction) -> str:
        """The phase as far as its own computation tells it, else "".

        A collective that is combined from several runs when its last operand is there, whatever name it kept.
        """
        own = named_phase(site.op_name)
        if own and len(site.operands) < 2:
            return own
        before, after = self.neighbours(computation)
        read = max((before.get(operand, "") for operand in site.operands), key=ORDER.__getitem__, default="")
        return max(own, read, key=ORDER.__getitem__) or after.get(site.name, "")

    def neighbours(self, computation: str) -> tuple[dict[str, str], dict[str, str]]:
        """(phase by what is read, phase by who reads) for every instruction, in one pass each way."""
        if computation in self.inherited:
            return self.inherited[computation]
        program = self.program
        before: dict[str, str] = {}
        after: dict[str, str] = {}
        sites = []
        for name in program.index(computation).line_of:
            site = program.instruction(computation, name)
            assert site is not None
            own = named_phase(site.op_name) if site.opcode != "parameter" else ""  # there it is an argument's name
            sites.append((name, own, site.operands))
            read = max((before.get(operand, "") for operand in site.operands), key=ORDER.__getitem__, default="")
            if not own and read == "backward" and site.op_name and site.opcode not in MOVES_DATA:
                own = "update"  # arithmetic on gradients that automatic differentiation did not write
            before[name] = own or read
        for name, own, operands in reversed(sites):
            needed = own or after.get(name, "")
            for operand in operands:
                known = after.get(operand, "")
                if needed and (not known or ORDER[needed] < ORDER[known]):
                    after[operand] = needed
        self.inherited[computation] = before, after
        return before, after
