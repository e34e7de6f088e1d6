"""Megatron's tensor parallel (Shoeybi et al., 1909.08053): even layers split by columns, odd ones by rows, over `tp`.

The columns of an even W produce exactly those activations that the rows of the next W need, so nothing is communicated
within a pair of layers. Forward: one all_reduce after every pair (g). Backward: one before every pair (f) except the
first, whose input needs no gradient. B D e bytes each, L - 1 times.

In a transformer the pair is within a layer: q, k, v and o, with a rank's heads, or up and down. f comes after the norm,
so there is no exception, and 4 all_reduces of B S D e bytes in each block. Every rank routes all tokens, but gets only
its part of the gradient of the gates, so the router's gradient is summed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from contract.problem import Layer
from contract.transformer import TENSOR_DIMS, Experts
from torch_impl.collectives import all_reduce_identity, identity_all_reduce
from torch_impl.mesh import Mesh
from torch_impl.model import gelu

AXIS = "tp"
COLUMNS, ROWS = Layer(1, 0), Layer(0, None)  # the dim of each parameter that is split


def split_params(params: list[Any], mesh: Mesh) -> list[Any]:
    """Even layers: W[D, F_tp], b[F_tp]. Odd layers: W[F_tp, D], and the whole b[D].

    In a block: q, k, v[D, (H K)_tp], o[(H K)_tp, D]; up[D, F_tp], down[F_tp, D]; everything else is whole.
    """
    dims = [TENSOR_DIMS.get(type(layer), ROWS if i % 2 else COLUMNS) for i, layer in enumerate(params)]
    return [mesh.split(layer, of_layer, AXIS) for layer, of_layer in zip(params, dims, strict=True)]


def weights(layer: Any, mesh: Mesh) -> Any:
    """Backward: drouter[D, E] = AllReduce_tp(drouter[D, E]{U_tp}). Everything else is used as it is."""
    if not isinstance(layer, Experts):
        return layer
    return layer._replace(router=identity_all_reduce(layer.router, mesh.group(AXIS)))


def forward(params: Iterable[Layer], x: Tensor, mesh: Mesh) -> Tensor:
    """The layers in pairs. Input and output are whole on every rank: X[B, D]."""
    layers = iter(params)
    for (w_up, b_up), (w_down, b_down) in zip(layers, layers, strict=True):
        h = gelu(enter(x, mesh) @ w_up + b_up)  # H[B, F_tp] = X[B, D] @ W[D, F_tp]
        y = leave(h @ w_down, mesh)  # Y[B, D]{U_tp} = H[B, F_tp] @ W[F_tp, D]
        x = gelu(y + b_down)  # the bias is added once, after the sum
    return x


def enter(x: Tensor, mesh: Mesh) -> Tensor:
    """f: X is whole on every rank. Backward: dX = AllReduce_tp(dX{U_tp})."""
    return identity_all_reduce(x, mesh.group(AXIS))


def leave(y: Tensor, mesh: Mesh) -> Tensor:
    """g: Y = AllReduce_tp(Y{U_tp}). Backward: dY is whole on every rank."""
    return all_reduce_identity(y, mesh.group(AXIS))
