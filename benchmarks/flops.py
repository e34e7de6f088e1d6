"""The operations of matrix products, derived from the sizes alone. A product of [B, D] and [D, F] takes 2 B D F."""

from __future__ import annotations

from math import prod

from contract.problem import Problem
from contract.transformer import Transformer


def products(problem: Problem, recompute: str = "none") -> int | None:
    """Of one step of a single device; None where experts choose their rows.

    The backward pass makes two products of each, but for the input of an MLP's first layer. What is recomputed is the
    forward pass of a block, or attention, each without its last product, whose result no gradient needs: by `down`, or
    of probabilities with values.
    """
    forward, attention = products_of_forward(problem), products_of_attention(problem)
    if not isinstance(problem, Transformer):
        return 3 * forward - forward // problem.layers
    down = 2 * problem.batch * problem.sequence * problem.ff * problem.width * problem.layers
    again = {"none": 0, "block": forward - down, "selective": attention // 2}[recompute]
    return None if problem.experts else 3 * forward + again


def products_of_forward(problem: Problem) -> int:
    """Of one forward pass."""
    return products_of_layers(problem) + products_of_attention(problem)


def products_of_attention(problem: Problem) -> int:
    """Of queries with all keys, masked or not, and of the probabilities with the values, in one forward pass."""
    tokens = problem.batch * problem.sequence
    return 4 * tokens * problem.sequence * problem.width * problem.layers if isinstance(problem, Transformer) else 0


def products_of_layers(problem: Problem) -> int:
    """Of the products with parameters, in one forward pass. Experts are not counted."""
    shapes = [shape for layer in range(problem.unit) for shape in problem.shape(layer) if len(shape) == 2]
    return 2 * problem.batch * problem.sequence * problem.layers * sum(map(prod, shapes))
