"""The models of the library equivalents in torch: the same MLP, and the same transformer, from torch's own modules.

`parameters()` gives what our layers have in the same order, but for the matrices of `nn.Linear`, which are transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.steps.peer_experts import SparseExperts
from contract.problem import Layer
from contract.strategy import Run
from contract.transformer import EPSILON, Attention, Experts, Mlp, Transformer
from torch_impl import train

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v[B, H, S, K] -> [B, H, S, K]
MakeExperts = Callable[[Experts, Transformer], nn.Module]


class MLP(nn.Module):
    """The MLP. params: layers of w[in, out] and b[out], as everywhere else."""

    def __init__(self, params: Sequence[Layer]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(linear(w, b), nn.GELU()) for w, b in params)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class SelfAttention(nn.Module):
    """Causal attention with as many heads as the columns of q give, which may be a rank's part of them."""

    def __init__(self, params: Attention, problem: Transformer, attend: Attend):
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(w) for w in params[1:])
        self.size, self.attend = problem.width // problem.heads, attend

    def forward(self, x: Tensor) -> Tensor:
        heads = (project(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for project in (self.q, self.k, self.v))
        return self.o(self.attend(*heads).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm block: attention, then the MLP or the experts."""

    def __init__(self, first: Attention, second: Any, problem: Transformer, attend: Attend, experts: MakeExperts):
        super().__init__()
        self.attention_norm, self.attention = norm(first.gain), SelfAttention(first, problem, attend)
        self.mlp_norm = norm(second.gain)
        self.mlp = mlp(second) if isinstance(second, Mlp) else experts(second, problem)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Blocks(nn.Module):
    """The transformer. params: of attention and of the MLP or the experts, for every block in turn."""

    def __init__(self, params: Sequence[Any], problem: Transformer, attend: Attend, experts: MakeExperts):
        super().__init__()
        pairs = zip(params[::2], params[1::2], strict=True)
        self.layers = nn.ModuleList(Block(first, second, problem, attend, experts) for first, second in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def linear(w: Tensor, b: Tensor | None = None) -> nn.Linear:
    """nn.Linear of w[in, out] and b[out]."""
    made = nn.Linear(*w.shape, bias=b is not None, device="meta")
    made.weight = nn.Parameter(w.T.contiguous())
    if b is not None:
        made.bias = nn.Parameter(b.clone())
    return made


def norm(gain: Tensor) -> nn.RMSNorm:
    """nn.RMSNorm with these gains."""
    made = nn.RMSNorm(len(gain), EPSILON, device="meta")
    made.weight = nn.Parameter(gain.clone())
    return made


def mlp(params: Mlp) -> nn.Sequential:
    """up, gelu, down."""
    return nn.Sequential(linear(params.up), nn.GELU(), linear(params.down))


def scaled_dot_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def full_model(
    run: Run,
    device: torch.device,
    layers: slice = slice(None),
    attend: Attend = scaled_dot_product,
    experts: MakeExperts = SparseExperts,
) -> MLP | Blocks:
    """The model with the initial parameters, or some of its layers."""
    problem = run.problem
    params = [layer._make(train.tensor(a, problem.dtype) for a in layer) for layer in problem.parameters()[layers]]
    made = Blocks(params, problem, attend, experts) if isinstance(problem, Transformer) else MLP(params)
    return made.to(device)
