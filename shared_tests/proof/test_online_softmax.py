"""Attention to a part by products is what torch's fused kernel computes, forward and backward."""

from __future__ import annotations

import pytest
import torch

from torch_impl import fused_attention, online_softmax


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_products_and_the_fused_kernel_agree(causal, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 3, 6, 4, dtype=torch.float64, generator=draw) for _ in range(4))
    assert fused_attention.usable(q)

    def both():
        out, total = online_softmax.attend_to(q, k, v, causal)
        # The whole may know of keys that this part does not have.
        back = online_softmax.attend_back(q, dout, 0.9 * out, total + 0.1, k, v, causal)
        return out, total, *back

    fused = both()
    monkeypatch.setattr(fused_attention, "usable", lambda q: False)
    for one, other in zip(fused, both(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)
