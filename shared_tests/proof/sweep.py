"""Every strategy, the documented pairs, all triples, and meshes of 1,024 chips: rows of the diff that no rule explains.

`python -m shared_tests.proof.sweep [TARGET...]` (make long) compiles all of them, alone and combined, for each target,
and prints a line for each with its count of unexplained rows, which should be 0. Two slices of it at once take half
an hour on 2 cores; a target and a number of axes (`cpu:8 3`) are such a slice.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from contract import cost
from contract.axes import parse_axes
from contract.problem import Problem
from contract.strategy import Run
from contract.transformer import Transformer
from jax_impl.compiled import compile
from shardiff import hlo
from shardiff.compiling.hardware import parse
from shardiff.diff.rows import align, unexplained
from shardiff.record import step_bytes

SPELLINGS = {"annotated": ("annotated", "best"), "naive": ("annotated", "naive"), "shard_map": ("shard_map", "best")}
TARGETS = ("cpu:8", "h100:8", "h100:2x8", "v5e:2x4")
OF_MLP = ("data_parallel", "tensor_parallel", "megatron_tensor_parallel", "fully_sharded", "zero1", "zero2")
AXES = {
    **dict.fromkeys(("data_parallel",), "dp"),
    **dict.fromkeys(("fully_sharded", "zero1", "zero2"), "fsdp"),
    **dict.fromkeys(("tensor_parallel", "megatron_tensor_parallel", "sequence_parallel"), "tp"),
    **dict.fromkeys(("context_parallel", "ring_attention", "ulysses"), "cp"),
    "expert_parallel": "ep",
}
OF_BLOCKS = tuple(name for name in AXES if name != "tensor_parallel")
PAIRS = (  # the mesh, where n stands for the rest of the ranks, and who is not the usual strategy of its axis
    "dp=2,tp=n",
    "dp=2,tp=n sequence_parallel",
    "fsdp=2,tp=n",
    "fsdp=2,tp=n sequence_parallel",
    "dp=2,fsdp=n",
    "pp=2,tp=n",
)
PAIRS_OF_BLOCKS = (
    "fsdp=2,cp=n context_parallel",
    "dp=2,cp=n ulysses",
    "cp=2,tp=n context_parallel",
    "fsdp=2,cp=n ring_attention",
    "dp=2,ep=n",
    "fsdp=2,ep=n",
    "ep=2,tp=n",
)
OUTERMOST_FIRST = ("pp", "dp", "fsdp", "cp", "ep", "tp")
MLP = Problem(batch=256, width=1024, layers=4)
BLOCKS = Transformer(batch=16, width=256, layers=2, sequence=64, heads=16, ff=512)
LARGE = (  # for 1,024 chips
    ("fsdp=64,tp=16", Problem(128, 1024, 4)),
    ("dp=16,fsdp=64", Problem(1024, 1024, 4)),
    ("fsdp=64,tp=16 sequence_parallel", Transformer(batch=64, width=1024, layers=2, sequence=64, heads=16, ff=4096)),
)


class Case(NamedTuple):
    """A spelling of a mesh of strategies for a target. mesh: with n for as many ranks as the target has left."""

    spelling: str
    mesh: str
    problem: Problem
    target: str

    @property
    def run(self) -> Run:
        """Raises ValueError for what the strategies refuse."""
        mesh, *strategies = self.mesh.split()
        ranks = parse(self.target).num_devices
        left = ranks // math.prod(int(size) for axis in mesh.split(",") if (size := axis.partition("=")[2]) != "n")
        axes = parse_axes(mesh.replace("=n", f"={left}"), tuple(strategies))
        experts = any(axis.strategy == "expert_parallel" for axis in axes)
        problem = replace(self.problem, experts=ranks) if experts else self.problem
        implementation, spelling = SPELLINGS[self.spelling]
        return Run(implementation, axes, problem, spelling=spelling)


def cases(target: str) -> Iterator[Case]:
    """All that is compiled for a target, with what is refused."""
    for problem, strategies in ((MLP, OF_MLP), (BLOCKS, OF_BLOCKS)):
        for strategy in strategies:
            for spelling in SPELLINGS:
                yield Case(spelling, f"{AXES[strategy]}=n {strategy}", problem, target)
        for mesh in (*PAIRS, *(PAIRS_OF_BLOCKS if problem is BLOCKS else ())):
            for spelling in ("annotated", "shard_map"):
                yield Case(spelling, mesh, problem, target)
        for mesh in triples(strategies):
            for spelling in ("annotated", "shard_map"):
                yield Case(spelling, mesh, problem, target)
    for strategy in ("megatron_tensor_parallel", "sequence_parallel", "fully_sharded"):
        ranks = parse(target).num_devices
        yield Case("annotated", f"{AXES[strategy]}=n {strategy}", replace(BLOCKS, experts=ranks), target)


def triples(strategies: tuple[str, ...]) -> Iterator[str]:
    """All meshes of three axes, each with each of its strategies."""
    on_axis = {axis: [name for name in strategies if AXES[name] == axis] for axis in OUTERMOST_FIRST}
    on_axis["pp"] = ["pipeline_parallel"]
    for axes in itertools.combinations([axis for axis in OUTERMOST_FIRST if on_axis[axis]], 3):
        for chosen in itertools.product(*(on_axis[axis] for axis in axes)):
            yield f"{axes[0]}=2,{axes[1]}=2,{axes[2]}=n {' '.join(chosen)}"


def every(targets: tuple[str, ...]) -> Iterator[Case]:
    """The cases of all targets; without any given, of TARGETS, of a TPU of another kind, and of 1,024 chips."""
    for target in targets or TARGETS:
        yield from cases(target)
    if not targets:
        for strategy in OF_MLP:
            yield Case("annotated", f"{AXES[strategy]}=n {strategy}", MLP, "tpu7x:2x2x1")
        for mesh, problem in LARGE:
            for spelling in ("annotated", "shard_map"):
                yield Case(spelling, mesh, problem, "v5p:8x8x16")


def check(case: Case) -> str | None:
    """A line on a case, which begins with "wrong" if rows are unexplained, and with "refused" if the compiler does not
    take it, as those for TPUs do not take some; None for what the strategies refuse."""
    try:
        run = case.run
    except ValueError:
        return None
    start = time.perf_counter()
    try:
        text = compile(run, parse(case.target)).hlo
    except ValueError as error:
        return f"refused: {error}"
    written, derived = cost.communication(replace(run, spelling="best").in_torch), hlo.read(text).records
    rows = unexplained(align(written, derived))
    kind = "transformer" if isinstance(run.problem, Transformer) else "mlp"
    verdict, seconds = "wrong" if rows else "ok", time.perf_counter() - start
    told = f"{case.spelling} {kind} {run.strategy} {run.mesh} {case.target}"
    return f"{verdict}: {told}: {step_bytes(derived):,} bytes, {rows} rows, {seconds:.1f} s"


if __name__ == "__main__":
    wrong, numbers = 0, [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    for case in every(tuple(argument for argument in sys.argv[1:] if not argument.isdigit())):
        if numbers and case.mesh.count("=") not in numbers:
            continue
        if line := check(case):
            print(line, flush=True)
            wrong += line.startswith("wrong")
    sys.exit(bool(wrong))
