"""In which phase of training a process is, and when a step begins and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardiff.tracing.libraries import backward_runs, graph_task
from shardiff.tracing.where import Where, setting_up

OUTSIDE = ("backward", "other")  # phases in which the next forward pass may begin without a module


class Phases:
    """phase: one of shardiff.record.PHASES. mark: is told that a step begins, or that an optimizer's ends it.

    A forward pass begins where a module runs that is not inside another, or a parameter is used outside of autograd's
    engine; a backward pass where the engine runs. Between the two, as in the loop that all-reduces every gradient, it
    stays backward. What is outside of a step's passes and of its optimizer is "other": set-up, evaluation, checkpoints.
    """

    def __init__(self, first: str, mark: Callable[[str], None]) -> None:
        self.phase, self.mark = first, mark
        self.begun = self.trained = self.evaluates = False
        self.depth = 0  # of optimizers' steps: one may have another inside

    def turn(self, phase: str) -> None:
        """A forward or a backward pass runs."""
        if phase == self.phase and self.begun:
            return
        if self.phase == "other" and setting_up():  # of functions that use parameters while they set up
            return
        self.phase, self.depth = phase, 0
        self.trained = self.trained or phase == "backward"
        if not self.begun:
            self.begun = True
            self.mark("begin")

    def open_to_any(self) -> bool:
        """Whether a forward pass may begin with any operator now, and not only with a module."""
        return self.phase in OUTSIDE and not self.evaluates and not backward_runs()

    def notice(self, func: Any, args: Any) -> None:
        """An operator is about to run."""
        if graph_task() != -1:
            if self.phase != "backward":
                self.turn("backward")
        elif self.phase in OUTSIDE and torch.is_grad_enabled() and func.name() != "aten::detach":
            if any(t.requires_grad and t.is_leaf for t in args if isinstance(t, Tensor)):
                self.turn("forward")

    def module_runs(self) -> None:
        """A module that is not inside another is about to run: for evaluation, if without gradients, once trained."""
        if not backward_runs():
            self.evaluates = self.trained and not torch.is_grad_enabled()
            if self.evaluates:
                self.phase = "other"
            else:
                self.turn("forward")

    def optimizer_begins(self, *_: Any) -> None:
        self.depth += 1
        self.phase = "update"

    def optimizer_ends(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth <= 0:
            self.depth, self.phase = 0, "other"
            if self.begun:
                self.begun = False
                self.mark("optimizer")

    def of(self, at: Where) -> str:
        """The phase of a call."""
        if at.setup:
            return "other"
        if self.phase == "other" and at.differentiable and not self.evaluates and not backward_runs():
            self.turn("forward")  # its parameters are out of sight in there
        elif self.phase in ("forward", "backward"):
            self.turn(self.phase)
        return self.phase
