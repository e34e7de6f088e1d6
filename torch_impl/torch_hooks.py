"""The one private call of torch that the strategies need: which hooks for saved tensors are in force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def saved_tensors_hooks_in_force() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The innermost hooks that `torch.autograd.graph.saved_tensors_hooks` has set, or functions that do nothing.

    Autograd calls the innermost hooks alone, so hooks that leave most tensors as they are must call the outer ones.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
    return hooks if hooks is not None else (lambda t: t, lambda t: t)
