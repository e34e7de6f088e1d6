"""Layers freed after the forward pass and gathered again for the backward pass (Zhao et al., 2304.11277, section 3.2).

Autograd keeps what the backward pass needs, among it the gathered weights. Here it keeps instead how to gather them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_impl.torch_hooks import saved_tensors_hooks_in_force


@dataclass(frozen=True)
class Again:
    """How to gather a weight: `gather(index)`. A type of our own, because other hooks may keep a tuple."""

    gather: Callable[[int], Tensor]
    index: int


@contextmanager
def gathered_again() -> Iterator[None]:
    """Inside the `with`, gathered weights are not kept for the backward pass but gathered again from their shards."""
    keep, get = saved_tensors_hooks_in_force()

    def pack(t: Tensor) -> Any:
        again: Any = getattr(t.grad_fn, "again", None)
        if again is None or t.ndim < 2:  # vectors are kept
            return keep(t)
        node: Any = t.grad_fn
        node.note(t.output_nr)
        return Again(again, t.output_nr)

    def unpack(kept: Any) -> Tensor:
        return kept.gather(kept.index) if isinstance(kept, Again) else get(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
