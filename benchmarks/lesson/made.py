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
    derived = [(run, target) for target in targets]
    naive = [(replace(run, spelling="naive"), target) for target in targets if spelt_naively(run)]
    every = compute([*derived, *naive], progress=progress, timeout=timeout) if targets else []
    return Lesson(run.in_torch, tuple(every[: len(derived)]), tuple(every[len(derived) :]))


def spelt_naively(run: Run) -> bool:
    """Whether a run has a naive spelling."""
    try:
        replace(run, spelling="naive")
    except ValueError:
        return False
    return True
