"""Which phase of a training step an HLO instruction belongs to.

JAX writes into op_name how a computation came about: jvp() around what is linearized (forward), transpose(jvp()) around
what is transposed (backward). Compilers lose op_names, so what an instruction reads and who reads it count as well.
"""

from __future__ import annotations

import re

from shardiff.hlo.flow import Flow
from shardiff.hlo.instruction import Instruction, find, instruction, names
from shardiff.hlo.text import Program, statements

UPDATE = re.compile(r"(?:^|[/(])(?:optimizer|optax|adam|sgd|apply_updates|apply_gradients|update(?=$|[/)]))", re.I)
BACKWARD = re.compile(r"(?:^|[/(])(?:backward|gradients?|grads?)(?=$|[/)])", re.I)
MAX_CALLERS = 16  # levels of calls, and calls of one computation, to look for a name in
MOVES_DATA = frozenset(
    "copy bitcast reshape transpose convert concatenate pad slice broadcast tuple get-tuple-element".split()
)
ORDER = {"": 0, "forward": 1, "backward": 2, "update": 3}


def names_of(op_name: str) -> list[str]:
    """The op_names of all that was combined, which a GPU's compiler writes as (a:b:c); of anything else, the one."""
    if op_name.startswith("(") and op_name.endswith(")") and ":" in op_name:
        return [name for name in op_name[1:-1].split(":") if name]
    return [op_name] if op_name else []


def named_phase(op_name: str) -> str:
    """What an op_name says, "" if nothing; of several the earliest, as what is combined must be there for the first."""
    found = {one_phase(name) for name in names_of(op_name)} - {""}
    return min(found, key=ORDER.__getitem__, default="")


def one_phase(op_name: str) -> str:
    """What one op_name says."""
    if "transpose(" in op_name or BACKWARD.search(op_name):
        return "backward"
    if "jvp(" in op_name:
        return "forward"
    return "update" if UPDATE.search(op_name) else ""


def latest(phases: list[str]) -> str:
    """The phase that comes last in a step."""
    return max(phases, key=ORDER.__getitem__, default="")


class Phases:
    """Phases of instructions: by name, else by what they read, else by who reads them, else by who calls them."""

    def __init__(self, program: Program, flow: Flow):
        self.program, self.flow = program, flow
        self.known: dict[str, tuple[dict[str, str], dict[str, str]]] = {}

    def of(
        self, computation: str, site: Instruction, repeats: tuple[str, str] | None = None, by_sum: bool = False
    ) -> str:
        """The phase of a collective; what its own computation does not tell, those that call it may, if they agree.

        repeats: of a gather of what was gathered before, where its result is. It has the name of what it gathers, and
        if the backward pass alone reads the result, it runs for that. by_sum: of a gather by a sum; where in the array
        a slice stands is computed once for all, so who reads the result tells more.
        """
        phase = self.told(computation, site)
        if by_sum and not site.op_name:
            return self.neighbours(computation)[1].get(site.name) or phase
        if phase == "forward" and repeats and self.neighbours(repeats[0])[1].get(repeats[1]) == "backward":
            return "backward"
        return phase

    def told(self, computation: str, site: Instruction) -> str:
        """The phase by names alone."""
        phases = {self.within(computation, site)}
        for _ in range(MAX_CALLERS):
            calls = self.flow.callers[computation][:MAX_CALLERS]
            if phases != {""} or not calls:
                break
            phases = {self.within(call.caller, call.site) for call in calls}
            computation = calls[0].caller
        return phases.pop() or "other" if len(phases) == 1 else "other"

    def within(self, computation: str, site: Instruction) -> str:
        """The phase as far as its own computation tells it, else "".

        A collective that is combined from several runs when its last operand is there, whatever name it kept.
        """
        own = named_phase(site.op_name)
        if own and len(site.operands) < 2:
            return own
        before, after = self.neighbours(computation)
        return latest([own, *(before.get(operand, "") for operand in site.operands)]) or after.get(site.name, "")

    def neighbours(self, computation: str) -> tuple[dict[str, str], dict[str, str]]:
        """(phase of every instruction's value, earliest phase among its readers), in one pass each way."""
        if computation in self.known:
            return self.known[computation]
        before: dict[str, str] = {}
        after: dict[str, str] = {}
        sites = []
        text, found = self.program.text, self.program.computations[computation]
        for statement in statements(text, found.start, found.end, None):
            if statement.opcode in ("parameter", "constant"):  # an argument's name, a value that several may share
                continue
            site = instruction(text, statement)
            op_name = self.op_name(site)
            own = named_phase(op_name)
            sites.append((site.name, own, site.operands, site.opcode.endswith("-done")))
            read = latest([before.get(operand, "") for operand in site.operands])
            if not own and read == "backward" and op_name and site.opcode not in MOVES_DATA:
                own = "update"  # arithmetic on gradients that automatic differentiation did not write
            before[site.name] = own or read
        for name, own, operands, is_done in reversed(sites):  # who reads the result of a start reads it from its end
            if needed := (after.get(name) or own if is_done else own or after.get(name)):
                for operand in operands:
                    after[operand] = min(needed, after.get(operand, needed), key=ORDER.__getitem__)
        self.known[computation] = before, after
        return before, after

    def op_name(self, site: Instruction) -> str:
        """An instruction's op_name; that of a fusion that has lost its own is that of what it computes first."""
        if site.op_name or site.opcode != "fusion":
            return site.op_name
        inner = [name for name in names(site.attributes.get("calls", "")) if name in self.program.computations]
        if len(inner) != 1:
            return ""
        found = find(self.program, inner[0], self.program.index(inner[0]).root)
        for _ in range(MAX_CALLERS):
            if found is None or found.op_name or found.opcode not in MOVES_DATA or not found.operands:
                break
            found = find(self.program, inner[0], found.operands[0])
        return found.op_name if found else ""
