"""What an XLA program does beside communicating: matrix products, and arrays moved to another layout.

Two programs with the same collectives can differ here, and then it is this that makes one of them slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardiff.hlo.flow import follow_calls
from shardiff.hlo.instruction import Instruction, find, instruction, leaves, split
from shardiff.hlo.records import CALLS
from shardiff.hlo.text import Program, parse

MOVES = ("transpose", "copy")


@dataclass
class Work:
    """Of one device in one run of the program; loops counted as often as they are known to run.

    products: `dot` instructions, and flops theirs, 2 for each multiplication; what a backend has made a custom call of
    is not among them. transposes, copies: instructions, inside of fusions too, with the bytes of their results.
    """

    products: int = 0
    flops: int = 0
    transposes: int = 0
    transposed_bytes: int = 0
    copies: int = 0
    copied_bytes: int = 0


def work(text: str) -> Work:
    """The work of an HLO program. Raises HloError, as `shardiff.hlo.read` does."""
    program = parse(text, frozenset(("dot", *MOVES)) | CALLS)
    calls = [site for site in program.interesting if site[1].opcode in CALLS]
    found = [site for site in program.interesting if site[1].opcode not in CALLS]
    flow = follow_calls(program, calls, {computation for computation, _ in found})
    total = Work()
    for computation, statement in found:
        if computation not in flow.executions:
            continue
        times = flow.executions[computation].max or 0
        site = instruction(text, statement)
        num_bytes = sum(leaf.num_bytes for _, leaf in leaves(site.shape))
        if site.opcode == "dot":
            total.products += times
            total.flops += times * flops(program, computation, site)
        elif site.opcode == "transpose":
            total.transposes += times
            total.transposed_bytes += times * num_bytes
        else:
            total.copies += times
            total.copied_bytes += times * num_bytes
    return total


def flops(program: Program, computation: str, dot: Instruction) -> int:
    """2 for each multiplication of a dot: elements of the result times those that each sums over."""
    left = find(program, computation, dot.operands[0])
    sizes = leaves(left.shape)[0][1].dims if left else ()
    summed = [int(dim) for dim in split(dot.attributes.get("lhs_contracting_dims", "{}").strip("{}"))]
    return 2 * prod(leaves(dot.shape)[0][1].dims) * prod(sizes[dim] for dim in summed if dim < len(sizes))
