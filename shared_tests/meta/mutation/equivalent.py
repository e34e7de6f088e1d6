"""Mutants that survive because they change nothing observable, and why."""

from __future__ import annotations

import re
from typing import NamedTuple


class Equivalent(NamedTuple):
    """where: function, as module.function. new: a regular expression for what the mutant writes; why: in words."""

    where: str
    new: str
    why: str


CODEC = re.compile(r'"(UTF-16|UTF-8|LATIN-1)"', re.IGNORECASE)

EQUIVALENT = (
    Equivalent(
        "contract.cost.communication",
        r"XXsingle_deviceXX|SINGLE_DEVICE|single_device.: lambda run: None",
        "single_device runs on one rank, for which nothing is looked up",
    ),
    Equivalent("contract.layout.merge", r"np\.full\(.*None, dtype\)", "every element is written, whatever stood there"),
    Equivalent("contract.layout.merge", r"^\s*break$", "no layout gives a rank b but not w"),
    Equivalent("contract.reference._update", r"XXparamsXX|PARAMS", "a name that only counts as one more"),
    Equivalent("contract.blocks.normal_cdf", r"np\.fromiter", "fromiter finds out the length; float64 is its default"),
    Equivalent(
        "shardiff.hlo.decode", r"encode\(.utf-8., (.XXreplaceXX.|.REPLACE.)?\)", "what was decoded can be encoded"
    ),
    Equivalent("shardiff.hlo.decode", r"most \+ 2\)", "more than `most` is more by one or by two"),
    Equivalent("shardiff.hlo.instruction.attributes", r"before = None", "as false as an empty name"),
    Equivalent("shardiff.hlo.instruction.split", r"in .XX\(\[\{XX.", "what a piece ends at is no letter"),
    Equivalent("shardiff.hlo.instruction.stack_frames", r"tables.get\(table, .XXXX.\)", "no row is in it either"),
    Equivalent(
        "shardiff.hlo.instruction.stack_frames", r"get\(.file_name_id., (None|.XXXX.)?\)", "no row has such a number"
    ),
    Equivalent(
        "shardiff.hlo.instruction.source_of", r"get\(.stack_frame_id., (None|.XXXX.)?\)", "no row has such a number"
    ),
    Equivalent("shardiff.hlo.errors.error", r"chr\(10\), None, position", "from the start"),
    Equivalent("shardiff.hlo.groups.mesh_groups", r"if part\[3\] else", "the pattern has both numbers or neither"),
    Equivalent("shardiff.hlo.groups.mesh_devices", r"assert ids", "words of an assertion that holds"),
    Equivalent("shardiff.hlo.groups.mesh_devices", r"np\.array\(integers", "int64 is NumPy's type of Python's numbers"),
    Equivalent("shardiff.hlo.loops.constant", r"attributes\.get\(.body., ", "a while loop has a body"),
    Equivalent("shardiff.hlo.loops.constant", r"Scalar\((None|1), value", "the offset is not looked at"),
    Equivalent("shardiff.hlo.loops.comparison", r"get\(.direction., ", "whatever stands for none is no direction"),
    Equivalent("shardiff.hlo.loops.Lookup.callee", r"XXXX", "no computation is called so"),
    Equivalent("shardiff.hlo.loops.Lookup.step", r"fuel (> 0|>= 1)", "a limit of effort, off by one"),
    Equivalent("shardiff.hlo.loops.scalar", r".index., .XXXX.\)", "no number is in it either"),
    Equivalent("shardiff.hlo.loops.trip_count", r"role, .XXXX.\)", "no computation is called so"),
    Equivalent("shardiff.hlo.records.flags_of", r".to_apply., .XXXX.\)", "no name of a promoted reduction either"),
    Equivalent("shardiff.hlo.work.flops", r"XX\{\}XX", "no number has an X"),
    Equivalent(
        "shardiff.diff.alignment.subset_with_sum",
        r"or len\(reached\)|total - size <= target|<= 10_000|< 10001",
        "a limit of effort: sums beyond the target lead nowhere",
    ),
)


def why_equivalent(function: str, old: str, new: str) -> str | None:
    """Why a mutant is equivalent, None if it is not. old, new: the lines of the function that it removes and adds."""
    if old.count("strict=True") > new.count("strict=True"):
        return "strict=True of a zip whose parts have one length by construction: it asserts what holds anyway"
    if old != new and CODEC.sub(lambda found: found[0].lower(), new) == old:
        return "another name of the same encoding"
    if re.search(r"strict=False", old) and re.search(r"strict=None|, \)", new):
        return "strict=False is zip's default"
    for one in EQUIVALENT:
        if one.where == function and re.search(one.new, new):
            return one.why
    return None
