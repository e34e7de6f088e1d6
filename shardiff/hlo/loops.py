"""How many trips a while loop makes: as annotated, else derived from its counter's start, step and bound.

CPU and GPU text has known_trip_count, TPU text has not. What is derived is what a `fori_loop` or `scan` compiles to: a
condition that compares a counter with a bound, a body that adds a constant to the counter, and a start; bound and
start are constants, perhaps handed through the state of loops around.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from shardiff.hlo.instruction import Instruction, find, names
from shardiff.hlo.text import Program

TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d{1,18})"?')
INTEGER, NUMBER = re.compile(r"\s*(-?\d{1,18})\s*"), re.compile(r"\s*(\d{1,6})\s*")
SAME_VALUE = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "broadcast", "optimization-barrier")
FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "EQ": "EQ", "NE": "NE"}
FUEL = 200  # instructions looked at for one loop; after a longer chain of arithmetic its trips stay unknown


class Site(NamedTuple):
    """Where a computation is called: caller, instruction, and the attribute that names the computation."""

    caller: str
    instruction: Instruction
    role: str


@dataclass(frozen=True)
class Scalar:
    """An integer, `offset`, or offset + the computation's parameter `number` (of that tuple, element `index`)."""

    offset: int
    number: int | None = None
    index: int | None = None

    @property
    def is_constant(self) -> bool:
        """Whether it is known."""
        return self.number is None

    def plus(self, offset: int) -> Scalar:
        """The sum with a known integer."""
        return Scalar(self.offset + offset, self.number, self.index)


@dataclass
class Lookup:
    """Where scalars are looked up: the program, where its computations are called, how many steps are left."""

    program: Program
    called: dict[str, list[Site]]
    fuel: int = FUEL

    def step(self) -> bool:
        """Use up one step, False if there is none left."""
        self.fuel -= 1
        return self.fuel >= 0

    def root(self, computation: str) -> str:
        """The name of a computation's root."""
        return self.program.index(computation).root

    def callee(self, site: Instruction) -> str | None:
        """What a fusion or call calls."""
        if site.opcode not in ("fusion", "call"):
            return None
        found = names(site.attributes.get("calls" if site.opcode == "fusion" else "to_apply", ""))
        return found[0] if found and found[0] in self.program.computations else None


def trip_count(program: Program, called: dict[str, list[Site]], caller: str, site: Instruction) -> int | None:
    """How often a while loop's body runs, None if that cannot be known."""
    if annotated := TRIP_COUNT.search(site.backend_config):
        return int(annotated[1])
    body, condition = (site.attributes.get(role, "").lstrip("%") for role in ("body", "condition"))
    if body not in program.computations or condition not in program.computations or not site.operands:
        return None
    lookup = Lookup(program, called)
    test = comparison(lookup, condition, lookup.root(condition))
    if test is None:
        return None
    direction, counter, bound = test
    if increment(lookup, body, counter) == 0:
        direction, counter, bound = FLIPPED[direction], bound, counter
    step = increment(lookup, body, counter)
    if not step or increment(lookup, body, bound) != 0:
        return None
    start = constant(lookup, caller, site.operands[0], counter.index)
    end = 0 if bound.is_constant else constant(lookup, caller, site.operands[0], bound.index)
    if start is None or end is None:
        return None
    return count_trips(direction, start + counter.offset, end + bound.offset, step)


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
    return -((start - bound) // step) if step > 0 else None


def comparison(lookup: Lookup, computation: str, name: str) -> tuple[str, Scalar, Scalar] | None:
    """(direction, left, right) of a loop's condition, seen through a fusion or a call around the comparison."""
    around: list[tuple[str, Instruction]] = []
    while lookup.step():
        site = find(lookup.program, computation, name)
        if site is None:
            return None
        if site.opcode == "compare" and len(site.operands) == 2:
            sides = [scalar(lookup, computation, operand, None) for operand in site.operands]
            for caller, call in reversed(around):
                sides = [outside(lookup, caller, call, side) for side in sides]
            left, right = sides
            direction = site.attributes.get("direction", "")
            return None if left is None or right is None or direction not in FLIPPED else (direction, left, right)
        if callee := lookup.callee(site):
            around.append((computation, site))
            computation, name = callee, lookup.root(callee)
        elif site.opcode in SAME_VALUE and site.operands:
            name = site.operands[0]
        else:
            return None
    return None


def outside(lookup: Lookup, caller: str, call: Instruction, value: Scalar | None) -> Scalar | None:
    """A scalar of a called computation, in terms of the computation that calls it."""
    if value is None or value.number is None:
        return value
    if value.number >= len(call.operands):
        return None
    found = scalar(lookup, caller, call.operands[value.number], value.index)
    return found and found.plus(value.offset)


def scalar(lookup: Lookup, computation: str, name: str, index: int | None) -> Scalar | None:
    """An instruction's value (of its tuple, element `index`), None if it is no Scalar."""
    offset = 0
    while lookup.step():
        site = find(lookup.program, computation, name)
        if site is None:
            return None
        if site.opcode == "constant":
            value = INTEGER.fullmatch(site.argument)
            return Scalar(offset + int(value[1])) if value else None
        if site.opcode == "parameter":
            number = NUMBER.fullmatch(site.argument)
            return Scalar(offset, int(number[1]), index) if number else None
        if callee := lookup.callee(site):
            found = outside(lookup, computation, site, scalar(lookup, callee, lookup.root(callee), index))
            return found and found.plus(offset)
        if site.opcode in ("add", "subtract") and len(site.operands) == 2:
            left, right = (scalar(lookup, computation, operand, None) for operand in site.operands)
            if left is None or right is None:
                return None
            if right.is_constant:
                return left.plus(offset + (right.offset if site.opcode == "add" else -right.offset))
            return right.plus(offset + left.offset) if left.is_constant and site.opcode == "add" else None
        position = NUMBER.fullmatch(site.attributes.get("index", ""))
        if not site.operands:
            return None
        if site.opcode == "get-tuple-element" and index is None and position:
            name, index = site.operands[0], int(position[1])
        elif site.opcode == "tuple" and index is not None and index < len(site.operands):
            name, index = site.operands[index], None
        elif site.opcode in SAME_VALUE:
            name = site.operands[0]
        else:
            return None
    return None


def increment(lookup: Lookup, body: str, value: Scalar) -> int | None:
    """What one trip adds to a scalar of the loop's state: 0 for a constant and for what the body hands through."""
    if value.is_constant:
        return 0
    after = scalar(lookup, body, lookup.root(body), value.index)
    if after is None or (after.number, after.index) != (value.number, value.index):
        return None
    return after.offset


def constant(lookup: Lookup, computation: str, name: str, index: int | None) -> int | None:
    """An integer that is the same whenever the computation runs; callers may hand it in, loops unchanged."""
    offset = 0
    while lookup.step():
        value = scalar(lookup, computation, name, index)
        if value is None:
            return None
        offset += value.offset
        if value.number is None:
            return offset
        sites = lookup.called.get(computation, [])
        if len(sites) != 1 or value.number >= len(sites[0].instruction.operands):
            return None
        computation, site, role = sites[0]
        if role in ("body", "condition"):
            body = site.attributes.get("body", "").lstrip("%")
            state = Scalar(0, value.number, value.index)
            if body not in lookup.program.computations or increment(lookup, body, state) != 0:
                return None
        elif role not in ("calls", "to_apply"):
            return None
        name, index = site.operands[value.number], value.index
    return None
