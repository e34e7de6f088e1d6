"""What a collective moves, as far as the text tells: its operands, where they come from, and how they are reduced.

Compilers hide it. A GPU's combined all-reduce has one flat operand, the concatenation of what was combined; a
reduction is a computation of its own; the name of a parameter is the op_name of ENTRY's argument.
"""

from __future__ import annotations

import re
from math import prod

from shardiff.hlo.errors import display
from shardiff.hlo.flow import Flow
from shardiff.hlo.instruction import Instruction, Leaf, find, instruction, leaves, names
from shardiff.hlo.text import Program, statements

REDUCTIONS = {
    "add": "sum",
    "maximum": "max",
    "minimum": "min",
    "multiply": "product",
    "and": "band",
    "or": "bor",
    "xor": "bxor",
}  # by torch's names
SAME_DATA = frozenset("copy bitcast reshape transpose convert copy-start copy-done optimization-barrier".split())
ZERO = re.compile(r"-?0(?:\.0*)?")
SORTS = frozenset(("sort", "topk"))
Joined = tuple[Leaf, tuple[int, ...] | None, str]  # an array, its shape before it was flattened, what made it: op_name
MOST_STEPS = 16  # how far an operand is followed
Inside = tuple[
    str, tuple[tuple[str, Instruction], ...]
]  # a computation, and who calls it from where, the last innermost


def reduction_of(program: Program, site: Instruction) -> str | None:
    """sum, max, ...: what the one arithmetic instruction of `to_apply` does; None where there is not exactly one."""
    if site.opcode.startswith("cross-replica-sum"):
        return "sum"
    found = [program.computations.get(name) for name in names(site.attributes.get("to_apply", ""))]
    if len(found) != 1 or found[0] is None:
        return None
    inside = statements(program.text, found[0].start, found[0].end, frozenset(REDUCTIONS))
    kinds = [REDUCTIONS[statement.opcode] for statement in inside]
    return kinds[0] if len(kinds) == 1 else None


def argument_of(program: Program, flow: Flow, computation: str, name: str) -> str | None:
    """The op_name of the argument of ENTRY whose data an operand is, unchanged but for its type and layout.

    None where the operand is computed, or cannot be followed; "" for an argument without a name.
    """
    computation, name = origin(program, flow, computation, name)
    site = find(program, computation, name) if computation == program.entry else None
    return display(site.op_name) if site and site.opcode == "parameter" else None


def origin(program: Program, flow: Flow, computation: str, name: str) -> tuple[str, str]:
    """The computation and the name of what made an operand's data, unchanged since but for its type and layout; as far
    as that can be followed."""
    for _ in range(MOST_STEPS):
        site = find(program, computation, name)
        if site is None:
            break
        if site.opcode == "parameter":
            calls = flow.callers.get(computation, [])
            number = int(site.argument) if site.argument.strip().isdecimal() else -1
            if len(calls) != 1 or not 0 <= number < len(calls[0].site.operands):
                break
            if calls[0].site.opcode not in ("call", "fusion", "async-start"):
                break  # the one parameter of a loop's body is a tuple
            computation, name = calls[0].caller, calls[0].site.operands[number]
        elif len(site.operands) == 1 and (site.opcode in SAME_DATA or only_moves(program, site)):
            name = site.operands[0]
        else:
            break
    return computation, name


def is_slice_in_zeros(program: Program, computation: str, name: str) -> bool:
    """Whether an operand is zeros but for a slice that each rank writes into them: a sum of such operands gathers."""
    made = source(program, (computation, ()), name)
    if made is None or made[1].opcode != "dynamic-update-slice" or not made[1].operands:
        return False
    made = source(program, made[0], made[1].operands[0])
    if made and made[1].opcode == "broadcast" and len(made[1].operands) == 1:
        made = source(program, made[0], made[1].operands[0])
    return made is not None and made[1].opcode == "constant" and ZERO.fullmatch(made[1].argument.strip()) is not None


def source(program: Program, where: Inside, name: str) -> tuple[Inside, Instruction] | None:
    """What computed an operand's data, unchanged since but for its type and layout, looking into fusions and out of
    them again; and in which of them it is. None for an operand that is missing, or further away than MOST_STEPS."""
    for _ in range(MOST_STEPS):
        computation, callers = where
        if (site := find(program, computation, name)) is None:
            return None
        if site.opcode == "parameter" and callers:
            (outer, call), number = callers[-1], site.argument.strip()
            if not number.isdecimal() or int(number) >= len(call.operands):
                return None
            where, name = (outer, callers[:-1]), call.operands[int(number)]
        elif site.opcode == "get-tuple-element" and len(site.operands) == 1:
            call, number = find(program, computation, site.operands[0]), site.attributes.get("index", "")
            body = body_of(program, call) if call else None
            root = find(program, body, program.index(body).root) if body else None
            if call is None or body is None or root is None or root.opcode != "tuple" or not number.isdecimal():
                return where, site
            if int(number) >= len(root.operands):
                return None
            where, name = (body, (*callers, (computation, call))), root.operands[int(number)]
        elif body := body_of(program, site):
            where, name = (body, (*callers, (computation, site))), program.index(body).root
        elif len(site.operands) == 1 and (site.opcode in SAME_DATA or site.opcode == "reduce-precision"):
            name = site.operands[0]
        else:
            return where, site
    return None


def body_of(program: Program, site: Instruction) -> str | None:
    """The computation of a fusion; None for anything else."""
    found = names(site.attributes.get("calls", "")) if site.opcode == "fusion" else []
    return found[0] if len(found) == 1 and found[0] in program.computations else None


def only_moves(program: Program, site: Instruction) -> bool:
    """Whether a fusion changes nothing but the type and the layout of its operand."""
    if (body := body_of(program, site)) is None:
        return False
    found = program.computations[body]
    inside = statements(program.text, found.start, found.end, None)
    return all(statement.opcode in SAME_DATA or statement.opcode == "parameter" for statement in inside)


def concatenated(program: Program, computation: str, name: str) -> list[Joined]:
    """The arrays that a concatenate, or a fusion that ends in one, joined into an operand; [] where none did."""
    where: Inside = (computation, ())
    for _ in range(MOST_STEPS):
        site = find(program, where[0], name)
        if site is None:
            return []
        if body := body_of(program, site):
            where, name = (body, (*where[1], (where[0], site))), program.index(body).root
        elif site.opcode in ("bitcast", "reshape", "copy") and len(site.operands) == 1:
            name = site.operands[0]
        elif site.opcode == "concatenate":
            found = [find(program, where[0], operand) for operand in site.operands]
            shapes = [leaves(one.shape) if one else [] for one in found]
            flat = all(len(shape) == 1 and len(shape[0][1].dims) <= 1 for shape in shapes)
            named = [
                joined(program, where, shape[0][1], one)
                for shape, one in zip(shapes, found, strict=True)
                if shape and one
            ]
            return named if flat and len(named) > 1 else []
        else:
            return []
    return []


def joined(program: Program, where: Inside, flat: Leaf, one: Instruction) -> Joined:
    """An operand of a concatenate, and what made it, if it has no name itself."""
    made = None if one.op_name else source(program, where, one.name)
    one = made[1] if made else one
    found = leaves(one.shape)
    dims = found[0][1].dims if len(found) == 1 else ()
    return flat, dims if len(dims) > 1 and prod(dims) == prod(flat.dims) else None, one.op_name


def sort_of(program: Program, computation: str, site: Instruction, known: dict[str, dict[str, str]]) -> str:
    """The op_name of the sort that reads what a partitioner has gathered, since it does not split a sort; else "".

    jaxlib 0.10 gives the gather that name, and 0.11 the name of what made the gathered array. known: for computations
    that have been asked for, by the names of operands.
    """
    if "is_spmd_generated" not in site.attributes.get("frontend_attributes", ""):
        return ""
    if computation not in known:
        found = program.computations[computation]
        sorts = (instruction(program.text, where) for where in statements(program.text, found.start, found.end, SORTS))
        known[computation] = {operand: sort.op_name for sort in sorts for operand in sort.operands}
    return known[computation].get(site.name, "")


def op_name_of(
    program: Program, flow: Flow, computation: str, site: Instruction, unsplit: dict[str, dict[str, str]]
) -> str:
    """The op_name of a collective: of a sort that reads it, its own, that of the one instruction that calls its
    computation, as a fusion around it has it, or of what made its one operand, where a compiler has kept no other; else
    "". unsplit: `known` of `sort_of`."""
    if found := sort_of(program, computation, site, unsplit) or site.op_name:
        return found
    calls = flow.callers.get(computation, [])
    if len(calls) == 1 and calls[0].site.op_name:
        return calls[0].site.op_name
    one = len(site.operands) == 1
    made = find(program, *origin(program, flow, computation, site.operands[0])) if one else None
    return made.op_name if made else ""
