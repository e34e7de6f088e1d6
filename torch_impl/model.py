"""The parts of the MLP that all strategies share: layers, activation, loss, and the handling of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from contract.problem import Batch, Layer
from torch_impl.mesh import Mesh


def forward(params: Iterable[Layer], x: Tensor, mesh: Mesh) -> Tensor:
    """The layers as a single device computes them, for every strategy that does not cut inside a layer."""
    for w, b in params:
        x = gelu(x @ w + b)  # Y[B, F] = X[B, D] @ W[D, F]
    return x


def gelu(x: Tensor) -> Tensor:
    """z Phi(z), computed by erf, not by tanh. Any shape, elementwise."""
    return F.gelu(x, approximate="none")


def squared_error(out: Tensor, batch: Batch) -> Tensor:
    """sum(weight * (out - y)^2), a scalar in the weight's dtype: the part of the global mean that `out` contributes."""
    residual = (out - batch.y).to(batch.weight.dtype)
    return (batch.weight * residual.square()).sum()


def clear_grads(params: list[Any]) -> None:
    """Drop the last step's gradients, so that the backward pass hands over its own buffers without a copy."""
    for layer in params:
        for p in layer:
            p.grad = None


def take_grads(params: list[Any]) -> Iterator[Any]:
    """The gradients that the backward pass has left. A layer's are freed when nobody else holds them."""
    for layer in params:
        grads = layer._make(p.grad for p in layer)
        for p in layer:
            p.grad = None
        yield grads
