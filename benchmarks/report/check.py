"""The chapter on equality."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.documents.check import Check, Settings
from benchmarks.report.blocks import BAD, GOOD, Block, Cell, Table, Text
from benchmarks.report.pictures import Draw
from benchmarks.words import counted
from contract.proof import LIMITS


def summary(result: Check) -> Iterator[str]:
    held = sum(row.passed for row in result.rows)
    errors = [
        (error, name, row)
        for row in result.rows
        for error, name in ((row.loss_error, "loss"), (row.grad_error, "gradients"), (row.param_error, "parameters"))
        if error is not None
    ]
    text = f"{held} of {counted(len(result.rows), 'run')} equal the single-device float64 reference"
    if errors:
        error, name, row = max(errors, key=lambda one: one[0])
        text += f"; the largest relative error is {error:.1e} ({name} of {row.implementation} {row.strategy})"
    yield text + "."


def sizes(settings: Settings) -> str:
    """The sizes that all runs of a transformer share, in words."""
    names = ("batch", "sequence", "width", "heads", "ff", "layers", "recompute")
    return ", ".join(f"{name} {value}" for name in names if (value := getattr(settings, name)) is not None)


def blocks(result: Check, draw: Draw) -> Iterator[Block]:
    columns = ["implementation", "strategy", "mesh", "dtype", "optimizer", "loss", "gradients", "parameters", "verdict"]
    rows = []
    for row in result.rows:
        words = [Cell(word) for word in (row.implementation, row.strategy, row.mesh, row.dtype, row.optimizer)]
        errors = (row.loss_error, row.grad_error, row.param_error)
        numbers = [Cell("not finite" if error is None else f"{error:.1e}") for error in errors]
        rows.append([*words, *numbers, Cell("equal", GOOD) if row.passed else Cell("DIFFERS", BAD)])
    yield Table(columns, [False] * 5 + [True] * 3 + [False], rows)
    if result.settings.model != "mlp":
        yield Text(f"All runs train a {result.settings.model}: {sizes(result.settings)}.")
    limits = ", ".join(f"{limit:g} in {dtype}" for dtype, limit in LIMITS.items())
    steps = counted(max((row.steps for row in result.rows), default=0), "step")
    yield Text(
        f"Errors are ||got - want|| / ||want||. A run passes with errors of at most {limits}; in bfloat16, of at most "
        "twice the error of the same framework on a single device. Losses are compared at every step, "
        f"{steps} in all; gradients, parameters and optimizer state are compared in full.",
        "note",
    )
