"""A lesson made: what is written is traced, and what is derived is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.diff_strategies import compute
from benchmarks.lesson.lesson import Lesson
from contract.strategy import Run


def make(run: Run, targets: Sequence[Any], progress: Callable[[str], None], timeout: float) -> Lesson:
    """Trace and compile what the lesson shows. Raises ValueError for what cannot be compiled."""
    derived = [(as_annotated(run), target) for target in targets]
    spelled = [(as_annotated(run, "naive"), target) for target in targets if "fully_sharded" in run.strategies]
    every = compute([*derived, *spelled], progress=progress, timeout=timeout) if targets else []
    return Lesson(run.in_torch, tuple(every[: len(derived)]), tuple(every[len(derived) :]))


def as_annotated(run: Run, spelling: str = "best") -> Run:
    """The run that XLA derives the communication of."""
    return replace(run, implementation="annotated", spelling=spelling)
