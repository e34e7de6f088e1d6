"""A GPT of the size of minGPT's smallest, trained by DistributedDataParallel, and by parallelize_module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from shardiff.tracing.tracer import capture
from shared_tests.tool.pairs.sizes import BATCH, HEADS, LAYERS, STEPS, TOKENS, VOCABULARY, D


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (
            product(normed).unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for product in (self.q, self.k, self.v)
        )
        x = x + self.o(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, D), nn.Embedding(TOKENS, D)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(model: nn.Module, batch: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(STEPS):
        torch.manual_seed(step)
        ids, targets = torch.randint(VOCABULARY, (2, batch, TOKENS))
        cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def data_parallel() -> None:
    torch.manual_seed(0)
    train(DistributedDataParallel(GPT()), BATCH // dist.get_world_size())


def fully_sharded() -> None:
    torch.manual_seed(0)
    model, over = GPT(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)
    train(model, BATCH // dist.get_world_size())


def tensor_parallel() -> None:
    torch.manual_seed(0)
    model, over = GPT(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    columns = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    for block in model.blocks:
        parallelize_module(block, over, {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()})
    train(model, BATCH)


PROGRAMS: dict[str, Callable[[], None]] = {
    "data_parallel": data_parallel,
    "fully_sharded": fully_sharded,
    "tensor_parallel": tensor_parallel,
}


def traced(device: Any, names: tuple[str, ...]) -> dict[str, list[Any]]:
    """On a rank: the calls of each of these PROGRAMS."""
    found = {}
    for name in names:
        with capture(first_phase="other") as calls:
            PROGRAMS[name]()
        found[name] = calls
    return found
