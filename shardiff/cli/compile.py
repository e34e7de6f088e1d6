"""What `shardiff compile` does: a JAX function of the user's, compiled for hardware that need not be here."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardiff import baseline, budget
from shardiff.cli import compiled_view as view
from shardiff.cli.answers import complain
from shardiff.compiling import launch
from shardiff.compiling.hardware import parse
from shardiff.compiling.meshes import parse_axes, sized
from shardiff.program import Program
from shardiff.record import SCHEMA, totals


@dataclass(frozen=True)
class Plan:
    """What is to be compiled, and what must hold of it. Made by `plan`, which refuses what cannot be."""

    function: str
    targets: tuple[str, ...]
    axes: dict[str, int]
    budgets: tuple[budget.Budget, ...] = ()
    baseline: Path | None = None
    update: bool = False


def plan(
    function: str,
    targets: Sequence[str],
    mesh: str | None,
    fail_on: Sequence[str] = (),
    baseline_file: Path | None = None,
    update: bool = False,
) -> Plan:
    """The options as a Plan. Raises ValueError, one line, for what cannot work."""
    launch.place_of(function)
    if not targets:
        raise ValueError("give at least one --target to compile for, such as cpu:8, h100:8 or v5e:4x4")
    parsed = [parse(text) for text in dict.fromkeys(targets)]
    if mesh is None:
        raise ValueError(f"give the axes of the mesh as --mesh, such as dp={parsed[0].num_devices}, or dp=-1,tp=2")
    axes = parse_axes(mesh)
    for target in parsed:
        sized(axes, target)
    names, budgets = tuple(map(str, parsed)), tuple(map(budget.parse_budget, fail_on))
    baseline.check(baseline_file, names, update)
    return Plan(function, names, axes, budgets, baseline_file, update)


def show(plan: Plan, as_json: bool) -> int:
    """Compile, print, and return the exit status: 1 for what the plan forbids, 3 where the user's code raised.

    Raises ValueError, one line, for what cannot be compiled.
    """
    try:
        stdout = 2 if as_json else None
        programs = launch.programs(plan.function, plan.targets, plan.axes, stdout)
    except launch.UserCodeError as error:
        complain(str(error))
        return 3
    found = dict(zip(plan.targets, programs, strict=True))
    broken = {target: budget.check(program, plan.budgets) for target, program in found.items()}
    if plan.baseline and not plan.update:
        before = baseline.read(plan.baseline)
        for target, program in found.items():
            broken[target] += budget.compare(program, before[target])
    for target, program in found.items():
        if as_json:
            print(json.dumps(to_json(target, program, broken[target])), flush=True)
        else:
            _print(program, target, broken[target])
    if plan.baseline and plan.update:
        baseline.update(plan.baseline, found)
    return int(any(broken.values()))


def to_json(target: str, program: Program, broken: Sequence[str]) -> dict[str, Any]:
    """Plain JSON types."""
    return {
        "schema": SCHEMA,
        "program": program.label,
        "target": target,
        "mesh": dict(program.mesh.axes) if program.mesh else None,
        "records": [record.to_json() for record in program],
        "totals": totals(program),
        "by_axis": view.by_axis(program),
        "memory": program.memory,
        "failed": list(broken),
    }


def _print(program: Program, target: str, broken: Sequence[str]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 130)
    console.print(f"{program.label}{_where(program, target)}", style="bold", markup=False)
    for part in view.render(program):
        console.print(part)
    for line in broken:
        console.print(line, style="red", markup=False)
    console.print()


def _where(program: Program, target: str) -> str:
    """The mesh, and how much of the target it leaves idle."""
    if not program.mesh:
        return ""
    used, there = program.mesh.size, parse(target).num_devices
    return f" ({program.mesh})" if used == there else f" ({program.mesh}; {used} of {there} devices)"
