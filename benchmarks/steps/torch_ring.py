"""torch's ring attention, `_templated_ring_attention`: a private function, which no other file imports.

It passes on keys and values as ours does, and calls torch's fused kernel for a pair of parts. With `load_balance` it
has the same two pieces of the sequence on every rank as ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"


class NotThere(Exception):
    """Why a library equivalent cannot take part, in one line."""


def ring_attention(group: ProcessGroup, dtype: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention of q, k, v[B, H, S_n, K] over the ranks of `group`. Raises NotThere, the same on every rank."""
    try:
        template: Any = importlib.import_module(MODULE)
        template._cp_options.enable_load_balance = True
        template._cp_options.convert_to_f32 = dtype != "float64"
        template.set_rotate_method("alltoall")
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        run, run_back = template._templated_ring_attention, template._templated_ring_attention_backward
    except (ImportError, AttributeError) as error:
        raise NotThere(f"this torch has no such private ring attention: {error}") from error

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, sums = run(group, 2, forward, q, k, v, is_causal=True)[:2]
            ctx.save_for_backward(q, k, v, out, sums)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            q, k, v, out, sums = ctx.saved_tensors
            given = grads[0], "grad_out", q, k, v, out, sums, True
            return run_back(group, 2, backward, *given, dropout_p=0.0)[:3]

    return Ring.apply
