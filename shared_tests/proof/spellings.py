"""What a transformer's strategies communicate on hardware that is not here, by the way in which they are spelt.

`python -m shared_tests.proof.spellings` (make long) compiles every figure of docs/transformer_spellings.md, and looks
for rows of the diff that no rule explains. Some minutes; `shared_tests.proof.sweep` has smaller sizes and all targets.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from contract import cost
from contract.axes import parse_axes
from contract.strategy import Run
from contract.transformer import Transformer
from jax_impl.compiled import compile
from shardiff import hlo
from shardiff.compiling.hardware import parse
from shardiff.diff.rows import align, unexplained
from shardiff.record import step_bytes

PAGE = Path(__file__).parents[2] / "docs" / "transformer_spellings.md"
SIZES = Transformer(batch=8, width=1024, layers=2, sequence=1024, heads=8, ff=4096)
AXES = {
    "megatron_tensor_parallel": "tp",
    "sequence_parallel": "tp",
    "context_parallel": "cp",
    "ring_attention": "cp",
    "ulysses": "cp",
    "expert_parallel": "ep",
}
SPELLINGS = {"annotated": ("annotated", "best"), "naive": ("annotated", "naive"), "shard_map": ("shard_map", "best")}


def run_of(strategy: str, spelling: str, problem: Transformer = SIZES, ranks: int = 8) -> Run:
    """A run of one strategy; with as many experts as ranks where experts are split."""
    problem = replace(problem, experts=ranks) if strategy == "expert_parallel" else problem
    implementation, spelt = SPELLINGS.get(spelling, ("torch", "best"))
    axes = parse_axes(f"{AXES[strategy]}={ranks}", (strategy,))
    return Run(implementation, axes, problem, spelling=spelt, microbatches=1)


def figures() -> dict[tuple[str, str, str], int]:
    """(strategy, spelling, target) -> wire bytes, as the page says. What is written has no target: ""."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if cells[0] in AXES:
            for target, number in zip(("", "cpu:8", "h100:8"), cells[2:], strict=True):
                if digits := re.sub(r"\D", "", number):
                    found[cells[0], cells[1], target] = int(digits)
    return found


def sent(run: Run, target: str) -> tuple[int, int]:
    """(wire bytes of a rank in one whole step, rows that no rule explains) of a run that is compiled for a target."""
    derived = hlo.read(compile(run, parse(target), update=True).hlo).records
    return step_bytes(derived), unexplained(align(cost.communication(run.in_torch), derived))


def check() -> Iterator[str]:
    """A line for everything that is compiled; those that begin with "wrong" are.

    A naive spelling may come to another strategy, so its diff may have rows that no rule explains.
    """
    for (strategy, spelling, target), want in figures().items():
        if target:
            got, rows = sent(run_of(strategy, spelling), target)
            right = got == want and (rows == 0 or spelling == "naive")
            yield f"{'ok' if right else 'wrong'}: {strategy} {spelling} {target}: {got:,} bytes, {rows} rows"


if __name__ == "__main__":
    wrong = 0
    for line in check():
        print(line, flush=True)
        wrong += line.startswith("wrong")
    sys.exit(bool(wrong))
