"""What XLA derives for the meshes of a plan: flops and bytes of the compiled program in place of the closed form.

Both sides are priced in the same way: products at the device's rate, and every collective on links that nothing else
uses, one after the other. So their difference is what the compiler's choices cost, before anything overlaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contract import cost
from contract.layout import share
from contract.planner.instructions import shape_of
from contract.planner.work import product
from contract.strategy import Run
from shardiff.cost import seconds
from shardiff.devices import Machine
from shardiff.program import Program


@dataclass(frozen=True)
class Side:
    """flops of rank 0's products; wire_bytes that a rank must send; axis -> seconds of its communication."""

    flops: float
    wire_bytes: int
    communication: dict[str, float]

    def seconds(self, rate: float) -> float:
        """Compute and communication, one after the other."""
        return self.flops / rate + sum(self.communication.values())


@dataclass(frozen=True)
class Compiled:
    """One mesh: the closed form beside the compiled program."""

    run: Run
    target: str
    closed: Side
    derived: Side


def closed_form(run: Run, machine: Machine) -> Side:
    """What the contract says of a run in torch."""
    mine, flops = share(run, 0), 0.0
    for one in mine.passes:
        for i, part in enumerate(mine.parts_of(one)):
            features, outputs = shape_of(part, run)
            times = 3 if i or one.input_grad else 2
            flops += times * product(one.rows, features, outputs, run.problem.dtype).flops
    records = cost.communication(run)
    program = Program(tuple(records), "written", run.mesh)
    return Side(flops, program.wire_bytes, seconds(program, machine.network))


def document(one: Compiled, machine: Machine) -> dict[str, Any]:
    """Plain JSON types."""
    rate = machine.device.rate(one.run.problem.dtype)
    sides = {"closed_form": one.closed, "compiled": one.derived}
    return {
        "mesh": dict(one.run.mesh.axes),
        "target": one.target,
        **{
            name: {
                "flops": side.flops,
                "wire_bytes": side.wire_bytes,
                "communication": side.communication,
                "seconds_without_overlap": side.seconds(rate),
            }
            for name, side in sides.items()
        },
    }
