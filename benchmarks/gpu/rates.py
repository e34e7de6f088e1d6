"""From seconds to rates: a step of one device as a share of what the device does in matrix products and in copies."""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchmarks.documents.figures import spread
from contract.problem import BYTES, Problem
from contract.transformer import Transformer


def flops_of_step(problem: Problem) -> int:
    """Of the matrix products of one step.

    An MLP's: 2 B D^2 each, three a layer, but two of the first, whose input needs no gradient. A block's forward pass:
    2 B S (4 D^2 + 2 D F), and 4 B S^2 D for all scores, also those that causality hides; the backward pass has twice as
    many, of every block, as the input of each product has a gain.
    """
    if isinstance(problem, Transformer):
        b, s, d, f = problem.batch, problem.sequence, problem.width, problem.ff
        return 3 * problem.layers * (2 * b * s * (4 * d * d + 2 * d * f) + 4 * b * s * s * d)
    return (3 * problem.layers - 1) * 2 * problem.batch * problem.width**2


def flops_of_product(problem: Problem) -> int:
    """Of X[B, D] @ W[D, D]."""
    return 2 * problem.batch * problem.width**2


def parameters(problem: Problem) -> int:
    """The number of parameters."""
    return sum(math.prod(shape) for layer in problem.shapes() for shape in layer)


def bytes_of_update(problem: Problem) -> int:
    """That AdamW must move: it reads parameters, gradients and two moments, and writes all but the gradients."""
    return 7 * parameters(problem) * BYTES[problem.dtype]


def device_rates(
    framework: str, problem: Problem, product: list[float], copy: list[float], moved: int
) -> dict[str, Any]:
    """What the device does in a matrix product and in a copy that reads and writes `moved` bytes in all."""
    return {
        "framework": framework,
        "dtype": problem.dtype,
        "flops_per_second": flops_of_product(problem) / statistics.median(product),
        "copy_bytes_per_second": moved / statistics.median(copy),
    }


def step_row(
    rates: dict[str, Any],
    implementation: str,
    problem: Problem,
    seconds: dict[str, list[float]],
    peak_bytes: int | None,
) -> dict[str, Any]:
    """One row. seconds: of the whole "step", and where they are timed by themselves of "passes" (forward and backward)
    and of the "update"."""
    step = statistics.median(seconds["step"])
    update = seconds.get("update")
    moved = bytes_of_update(problem)
    return {
        "framework": rates["framework"],
        "implementation": implementation,
        "model": "transformer" if isinstance(problem, Transformer) else "MLP",
        "dtype": problem.dtype,
        "batch": problem.batch,
        "width": problem.width,
        "layers": problem.layers,
        "sequence": problem.sequence,
        "step_seconds": spread(seconds["step"]),
        "passes_seconds": spread(seconds["passes"]) if "passes" in seconds else None,
        "update_seconds": spread(update) if update else None,
        "flops_per_second": flops_of_step(problem) / step,
        "share": flops_of_step(problem) / step / rates["flops_per_second"],
        "update_share": moved / statistics.median(update) / rates["copy_bytes_per_second"] if update else None,
        "peak_bytes": peak_bytes,
    }
