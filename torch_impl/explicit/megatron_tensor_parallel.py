"""Megatron's tensor parallel (Shoeybi et al., 1909.08053): even layers split by columns, odd ones by rows, over `tp`.

The columns of an even W produce exactly those activations that the rows of the next W need, so nothing is communicated
within a pair of layers. Forward: one all_reduce after every pair (g). Backward: one before every pair (f) except the
first, whose input needs no gradient. B D e bytes each, L - 1 times.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from contract.problem import Layer
from torch_impl.collectives import all_reduce_identity, identity_all_reduce
from torch_impl.mesh import Mesh
from torch_impl.model import gelu

AXIS = "tp"


def split_params(params: list[Layer], mesh: Mesh) -> list[Layer]:
    """Even layers: W[D, F_tp], b[F_tp]. Odd layers: W[F_tp, D], and the whole b[D]."""
    rank, n = mesh.rank(AXIS), mesh.size(AXIS)
    return [
        Layer(w.chunk(n, dim=0)[rank], b) if i % 2 else Layer(w.chunk(n, dim=1)[rank], b.chunk(n)[rank])
        for i, (w, b) in enumerate(params)
    ]


def forward(params: Iterable[Layer], x: Tensor, mesh: Mesh) -> Tensor:
    """The layers in pairs. Input and output are whole on every rank: X[B, D]."""
    group, layers = mesh.group(AXIS), iter(params)
    for (w_up, b_up), (w_down, b_down) in zip(layers, layers, strict=True):
        x = identity_all_reduce(x, group)  # f
        h = gelu(x @ w_up + b_up)  # H[B, F_tp] = X[B, D] @ W[D, F_tp]
        y = all_reduce_identity(h @ w_down, group)  # g: Y[B, D] = AllReduce_tp(H[B, F_tp] @ W[F_tp, D]{U_tp})
        x = gelu(y + b_down)  # the bias is added once, after the sum
    return x
