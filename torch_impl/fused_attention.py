"""torch's fused attention on a CPU, with the logarithms of its sums, which no public function gives.

It computes what the products in `torch_impl.online_softmax` do, block by block in the cache (FlashAttention,
2205.14135). No other file names these private operators; where a torch has none of them, the products are used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NAME = "_scaled_dot_product_flash_attention_for_cpu"
_FORWARD: Any = getattr(torch.ops.aten, _NAME, None)
_BACKWARD: Any = getattr(torch.ops.aten, f"{_NAME}_backward", None)


def usable(q: Tensor) -> bool:
    """Whether there is a fused kernel for these queries."""
    return q.device.type == "cpu" and _FORWARD is not None and _BACKWARD is not None


def attend_to(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """As `torch_impl.online_softmax.attend_to`."""
    out, total = _FORWARD(q, k, v, 0.0, causal)
    return out, total.unsqueeze(-1)


def attend_back(
    q: Tensor, dout: Tensor, out: Tensor, total: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `torch_impl.online_softmax.attend_back`."""
    of_whole = out, total.squeeze(-1)
    return _BACKWARD(dout, q, k, v, *of_whole, 0.0, causal)
