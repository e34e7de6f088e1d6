"""The first meshes of a plan, compiled for a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.plan.priced import Compiled, Side, closed_form
from contract.strategy import Run
from shardiff.cost import seconds
from shardiff.devices import Machine
from shardiff.program import Program


def compile_meshes(runs: Sequence[Run], target: str, machine: Machine) -> list[Compiled]:
    """The annotated programs of these runs, compiled for a target. Raises ValueError for what cannot be compiled."""
    from jax_impl import compiled as targets
    from shardiff import hlo
    from shardiff.compiling.hardware import parse
    from shardiff.hlo.work import work

    where = parse(target)
    if where.num_devices < machine.network.size:
        raise ValueError(f"{target} has {where.num_devices} devices, and the plan is for {machine.network.size}")
    annotated = [replace(run, implementation="annotated") for run in runs if run.in_gpipes_order]
    found = []
    for run, result in zip(annotated, targets.compile_all([(run, where) for run in annotated], "default"), strict=True):
        program = Program(tuple(hlo.read(result.hlo).records), "derived", run.mesh)
        derived = Side(work(result.hlo).flops, program.wire_bytes, seconds(program, machine.network))
        written = run.in_torch
        found.append(Compiled(written, target, closed_form(written, machine), derived))
    return found
