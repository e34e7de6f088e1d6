"""Experts as they are usually written in torch, which has no module of them.

Tokens, sorted by expert, travel by `all_to_all_single_autograd`. Ours sends every expert's slots, filled or not, and
finds them by products with arrays of 0 and 1. Here only the tokens that have a place travel, so the ranks first tell
each other how many come, and an expert computes on as many rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd

from contract.transformer import Experts, Transformer


class SparseExperts(nn.Module):
    """Top-k experts with a capacity, over the ranks of `group`: a rank has consecutive experts. None: on one device."""

    def __init__(self, params: Experts, problem: Transformer, group: ProcessGroup | None = None):
        super().__init__()
        ranks, rank = (group.size(), group.rank()) if group else (1, 0)
        self.problem, self.group, self.ranks = problem, group, ranks
        self.router = nn.Parameter(params.router.T.contiguous())  # [E, D], as nn.Linear has it
        self.up, self.down = (nn.Parameter(w.chunk(ranks)[rank].clone()) for w in (params.up, params.down))

    def forward(self, h: Tensor) -> Tensor:
        tokens = h.flatten(0, 1)
        token, expert, gate = self.route(h)
        counts = torch.bincount(expert, minlength=self.problem.experts)
        given, arrived = self.dispatch(tokens[token], counts)
        out = self.combine(self.compute(given, arrived), counts, arrived)
        return torch.zeros_like(tokens).index_add(0, token, out * gate[:, None]).view_as(h)

    def route(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token, expert and gate of every choice that gets a place, sorted by expert."""
        problem = self.problem
        wide = torch.float32 if h.dtype == torch.bfloat16 else h.dtype
        top, best = F.linear(h, self.router).softmax(-1, dtype=wide).topk(problem.top_k, dim=-1)  # [B, S, k]
        queue = F.one_hot(best.transpose(1, 2).flatten(1), problem.experts)  # [B, k S, E]
        ahead = (queue.cumsum(1) * queue).sum(-1) - 1  # first choices before second ones, tokens in their order
        placed = (ahead < problem.capacity).unflatten(1, (problem.top_k, -1)).transpose(1, 2)
        gates = (top / top.sum(-1, keepdim=True)).to(h.dtype)[placed]
        token = torch.arange(h.shape[0] * h.shape[1], device=h.device).view(h.shape[:2])
        token = token[..., None].expand_as(best)[placed]
        expert, order = best[placed].sort(stable=True)
        return token[order], expert, gates[order]

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The rows for this rank's experts from all ranks, and how many came, [rank, expert]."""
        if self.group is None:
            return rows, counts[None]
        arrived = torch.empty_like(counts)
        dist.all_to_all_single(arrived, counts, group=self.group)
        sent, arrived = counts.view(self.ranks, -1).sum(1).tolist(), arrived.view(self.ranks, -1)
        return all_to_all_single_autograd(rows, arrived.sum(1).tolist(), sent, self.group), arrived

    def combine(self, rows: Tensor, counts: Tensor, arrived: Tensor) -> Tensor:
        """The way back."""
        if self.group is None:
            return rows
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        return all_to_all_single_autograd(rows, sent, arrived.sum(1).tolist(), self.group)

    def compute(self, rows: Tensor, arrived: Tensor) -> Tensor:
        """Each expert's MLP on its rows, which come from one rank after the other."""
        pieces = rows.split(arrived.flatten().tolist())
        experts = len(self.up)
        out: list[Tensor] = [rows] * len(pieces)
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            mine = pieces[i::experts]
            made = F.gelu(torch.cat(mine) @ up) @ down
            out[i::experts] = made.split([len(piece) for piece in mine])
        return torch.cat(out)
