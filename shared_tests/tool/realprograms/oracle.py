"""What XLA's own parser sees in a program: how many collectives of each op, to hold against what `shardiff.read` says.

It is private (`jaxlib._hlo`), so it serves in tests alone.
"""

from __future__ import annotations

import re
from collections import Counter

OPS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "broadcast",
}
PIECE = re.compile(r"channel_id=(\d+).*chain_id=\"(\d+)\"")


def collectives(text: str) -> Counter[str]:
    """Op -> instructions. A collective that a TPU's compiler prints in pieces, with one channel and chain, counts once,
    and an all-reduce inside an all-reduce-scatter fusion as the reduce_scatter that it is."""
    from jaxlib import _hlo  # type: ignore[attr-defined]

    found: Counter[str] = Counter()
    pieces = set()
    for computation in _hlo.hlo_module_from_text(text).computations():
        for instruction in computation.instructions():
            opcode = named(instruction.opcode)
            if opcode == "async-start" and instruction.async_wrapped_root() is not None:
                continue  # its computation is among the others
            if (op := OPS.get(opcode.removesuffix("-start"))) is None:
                continue
            if op == "all_reduce" and computation.name.startswith("all-reduce-scatter"):
                op = "reduce_scatter"
            if piece := PIECE.search(instruction.to_string()):
                if (op, *piece.groups()) in pieces:
                    continue
                pieces.add((op, *piece.groups()))
            found[op] += 1
    return found


def named(opcode: object) -> str:
    """all-reduce-start of HloOpcode.kAllReduceStart."""
    name = str(opcode).rpartition(".k")[2]
    return "".join("-" + c.lower() if c.isupper() else c for c in name).lstrip("-")
