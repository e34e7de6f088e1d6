"""What is trained, an MLP or a transformer: its strategies, and its sizes in words and in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.words import counted
from contract.axes import STRATEGIES, STRATEGIES_OF_BLOCKS
from contract.problem import Problem
from contract.strategy import Run
from contract.transformer import Transformer

EXPERTS = 8  # of a transformer that expert_parallel splits, if nobody says how many


def strategies_of(problem: Problem) -> tuple[str, ...]:
    """The strategies that can train it."""
    return STRATEGIES_OF_BLOCKS if isinstance(problem, Transformer) else STRATEGIES


def with_experts(problem: Problem, strategies: Sequence[str]) -> Problem:
    """The problem, with experts where a strategy splits them and a transformer has none."""
    if "expert_parallel" in strategies and isinstance(problem, Transformer) and not problem.experts:
        return replace(problem, experts=EXPERTS)
    return problem


def sizes(problem: Problem) -> dict[str, Any]:
    """The sizes as documents have them: those of an MLP, or `model` and those of a transformer."""
    model = {"model": "transformer"} if isinstance(problem, Transformer) else {}
    return {**model, **asdict(problem)}


def sizes_of(run: Run) -> dict[str, Any]:
    """The same, and of a transformer what is recomputed."""
    return sizes(run.problem) | ({"recompute": run.recompute} if isinstance(run.problem, Transformer) else {})


def outline(problem: Problem) -> str:
    """The sizes in words, without the dtype."""
    if not isinstance(problem, Transformer):
        return f"batch {problem.batch}, width {problem.width}, {counted(problem.layers, 'layer')}"
    text = f"transformer, batch {problem.batch}, sequence {problem.sequence}, width {problem.width}, "
    text += f"{counted(problem.heads, 'head')}, ff {problem.ff}, {counted(problem.layers, 'block')}"
    return f"{text}, {experts(problem)}" if problem.experts else text


def experts(problem: Transformer) -> str:
    """The experts of a transformer in words."""
    return f"{counted(problem.experts, 'expert')}, top {problem.top_k}, capacity factor {problem.capacity_factor:g}"


def words(problem: Problem) -> str:
    """The sizes in words."""
    return f"{outline(problem)}, {problem.dtype}"


def words_of(run: Run) -> str:
    """The sizes in words, and what is recomputed."""
    return words(run.problem) + ("" if run.recompute == "none" else f", recompute {run.recompute}")
