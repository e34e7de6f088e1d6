"""`shardiff plan --prove`: what is to be proven, the proof, and its tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import bench, terminal
from benchmarks.lab.lab import LabError, refusal
from benchmarks.lab.namespaces import Shape
from benchmarks.plan.plan import rate_of
from benchmarks.plan.prove import view
from benchmarks.plan.prove.campaign import Campaign, prove
from benchmarks.plan.prove.claims import CLAIMS, prove_claims
from contract.axes import parse_axes
from contract.problem import Problem

MOST_RANKS = 16
# The CPU's own speed: it takes larger problems for a step to be more than what Python does, and faster links
REAL = Campaign((Shape(1, 2),), (100e6, 200e6, 400e6, 800e6), (Problem(256, 512, 4), Problem(2048, 256, 4)), paced=None)


def plan(
    shapes: Sequence[str],
    rates: Sequence[str],
    meshes: Sequence[str],
    problem: Problem,
    real: bool,
    iterations: int,
    microbatches: Sequence[int] | None,
) -> Campaign:
    """What to prove. Raises ValueError, one line, for what cannot be, also where namespaces are refused."""
    usual = REAL if real else Campaign()
    found = tuple(map(shape_of, shapes)) or usual.shapes
    bits = tuple(sorted(8 * rate_of(rate) for rate in rates)) or usual.rates
    if problem.dtype != "float32":
        raise ValueError(f"a proof runs in float32, got {problem.dtype}")
    if microbatches and len(microbatches) > 1:
        raise ValueError("a proof runs one number of microbatches")
    wanted = tuple(str(parse_mesh(mesh)) for mesh in meshes)
    problems = (problem,) if problem != usual.problems[0] else usual.problems
    campaign = Campaign(
        found,
        bits,
        problems,
        wanted,
        usual.paced,
        iterations,
        microbatches[0] if microbatches else usual.microbatches,
        in_turn=not (real or rates) and len(problems) > 1,
    )
    runs = [run for shape in found for one in problems for run in campaign.runs(shape, one)]
    if missing := [mesh for mesh in wanted if mesh not in {str(run.mesh) for run in runs}]:
        ranks = ", ".join(map(str, found))
        raise ValueError(f"the mesh {missing[0]} cannot run with these sizes on {ranks} ranks")
    if not runs:
        raise ValueError(f"no mesh can run with batch {problem.batch}, width {problem.width}, {problem.layers} layers")
    if flaw := refusal():
        raise ValueError(f"plan --prove: {flaw}")
    return campaign


def parse_mesh(text: str) -> Any:
    """The mesh of the usual strategies."""
    from shardiff.mesh import Mesh

    return Mesh(tuple((axis.name, axis.size) for axis in parse_axes(text)))


def shape_of(text: str) -> Shape:
    """`2x2`. Raises ValueError."""
    hosts, _, devices = text.partition("x")
    if not (hosts.isdigit() and devices.isdigit() and int(hosts) and int(devices)):
        raise ValueError(f"a shape is hosts x ranks of each, such as 1x2 or 2x2, got {text!r}")
    shape = Shape(int(hosts), int(devices))
    if not 2 <= shape.ranks <= MOST_RANKS:
        raise ValueError(f"a shape has 2 to {MOST_RANKS} ranks, {text} has {shape.ranks}")
    return shape


def answer(campaign: Campaign | None, output: Path | None, as_json: bool) -> int:
    """Measure a campaign, or the claims, and print tables or JSON; the exit status."""
    blocks = sum(
        len(each.runs(shape, problem))
        for each in ([campaign] if campaign else CLAIMS)
        for shape in each.shapes
        for _, problem in each.cases()
    )
    try:
        document, placed = bench.measured(
            lambda save, starting: prove([campaign], save, starting) if campaign else prove_claims(save, starting),
            output,
            blocks,
        )
    except (LabError, ValueError) as error:
        print(f"shardiff: {error}", file=sys.stderr)
        return 1 if isinstance(error, ValueError) else 3
    terminal.show_json(document) if as_json else terminal.show(view.parts(document), width=140)
    return 0 if placed else 2
