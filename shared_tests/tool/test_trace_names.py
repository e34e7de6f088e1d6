"""Whose memory a call sends: of a parameter, of its gradient, of a part of either, and of neither."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardiff.tracing.names import Moved, Names

BASE = torch.ones(16, 4)  # a parameter in every other row of it
OTHERS = torch.ones(8)
PARAMS = {
    "w": nn.Parameter(torch.ones(4, 4)),
    "rows": nn.Parameter(BASE[::2]),
    "turned": nn.Parameter(torch.ones(3, 5)),
}
GRADS = {"w": torch.ones(4, 4), "rows": torch.ones(8, 4), "turned": torch.ones(5, 3).t()}
for name, each in PARAMS.items():
    each.grad = GRADS[name]


@pytest.mark.parametrize(
    ("tensors", "moved"),
    [
        ([GRADS["w"]], ("gradient", "gradient of w")),
        ([PARAMS["w"].detach()[2:3]], ("parameter", "w")),
        ([BASE[10:11]], ("parameter", "rows")),
        ([GRADS["turned"].t()[4]], ("gradient", "gradient of turned")),
        ([GRADS["w"], GRADS["rows"]], ("gradient", "gradients of w, rows")),
        ([OTHERS], None),
        ([torch.ones(0)], None),
        ([], None),
    ],
)
def test_what_is_sent_is_known_by_its_memory(tensors: list[Tensor], moved: Moved | None) -> None:
    assert Names(PARAMS).moved(tensors) == moved
    assert Names({}).moved(tensors) is None
