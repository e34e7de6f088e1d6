"""The result of a check for people: a table, and lines below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks.check import Row, label
from benchmarks.problems import experts, outline
from contract.strategy import Run
from contract.transformer import Transformer
from shardiff.system import machine

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SHOWN = ("loss", "gradients", "parameters")


def parts(checked: Sequence[Row], columns: int) -> Iterator[RenderableType]:
    """All that is printed, for a terminal of so many columns."""
    yield table(checked, columns)
    yield from summary(checked)
    yield setting(checked)
    yield from left_out(checked)
    yield machine.summary(machine.facts())


def table(checked: Sequence[Row], columns: int) -> Table:
    """One line for each row, for a terminal of so many columns. In a narrow one, what all rows share is left out."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    named = {
        "implementation": [row.run.implementation for row in checked],
        "strategy": [row.run.strategy for row in checked],
        "mesh": [str(row.run.mesh) for row in checked],
        "dtype": [row.run.problem.dtype for row in checked],
        "optimizer": [row.run.optimizer for row in checked],
    }
    widths = [max(map(len, (name, *values))) for name, values in named.items()]
    widths += [max(7, len(claim)) for claim in (*SHOWN, "verdict")]
    narrow = columns < sum(widths) + 3 * len(widths)
    if narrow:
        named = {name: values for name, values in named.items() if len(set(values)) > 1 or name == "strategy"}
    result = Table(box=SIMPLE_HEAD, padding=0 if narrow else (0, 2, 0, 0), pad_edge=False)
    for name in named:
        result.add_column("implemen-\ntation" if narrow and name == "implementation" else name, overflow="fold")
    for claim in SHOWN:
        result.add_column(claim, justify="right", no_wrap=True, min_width=max(len(claim), 7))
    result.add_column("verdict", no_wrap=True)
    for cells, row in zip(zip(*named.values(), strict=True), checked, strict=True):
        errors = [f"{row.proof.errors[claim]:.1e}" for claim in SHOWN]
        result.add_row(*cells, *errors, "[green]equal[/]" if row.proof.passed else "[red]DIFFERS[/]")
    return result


def summary(checked: Sequence[Row]) -> list[str]:
    """How many rows hold, and what fails in those that do not."""
    failing = [row for row in checked if not row.proof.passed]
    lines = [f"{len(checked) - len(failing)} of {len(checked)} equal the single-device reference"]
    return lines + [f"{label(row.run)}: {failure}" for row in failing for failure in row.proof.failures]


def setting(checked: Sequence[Row]) -> str:
    """The settings that all runs of a check share."""
    runs = [row.run for row in checked]
    most = max(runs, key=experts_of)
    least = min(runs, key=experts_of)
    shared = [outline(least.problem), f"{runs[0].steps} steps"]
    for values in ({run.problem.dtype for run in runs}, {run.optimizer for run in runs}):
        shared += values if len(values) == 1 else []
    shared += [f"recompute {runs[0].recompute}"] if runs[0].recompute != "none" else []
    text = ", ".join(shared)
    if isinstance(most.problem, Transformer) and experts_of(most) > experts_of(least):
        text += f"; expert_parallel with {experts(most.problem)}"
    if any("pipeline_parallel" in run.strategies for run in runs):
        text += f"; pipeline_parallel in {runs[0].microbatches} microbatches"
        if runs[0].schedule != "gpipe":
            text += f", schedule {runs[0].schedule}"
    return text


def left_out(checked: Sequence[Row]) -> Iterator[str]:
    """What no annotation expresses, a line each."""
    if any(row.run.schedule != "gpipe" for row in checked):
        yield "Annotations can express GPipe's order only, so annotated is left out"
    rings = [row.run for row in checked if "ring_attention" in row.run.strategies]
    if any(run.implementation != "torch" for run in rings):
        yield "No annotation derives a ring, so ring_attention is not among the annotated ones"


def experts_of(run: Run) -> int:
    """The experts of a run's problem; 0 for a plain MLP."""
    return run.problem.experts if isinstance(run.problem, Transformer) else 0
