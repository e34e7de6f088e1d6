"""Training by torch's own libraries: DDP, FSDP2, DTensor, pipelining. Each with what a rank must send in a step.

A program is a function of no arguments that every rank calls: it builds its model, trains STEPS steps, and leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS = 4, 3
D, LAYERS, BATCH, TOKENS, HEADS = 32, 4, 8, 16, 4
FLOAT = 4  # bytes
WEIGHT, BIAS = D * D * FLOAT, D * FLOAT
MLP = LAYERS * (WEIGHT + BIAS)  # bytes of the parameters of `mlp`
ACTIVATIONS = BATCH * D * FLOAT  # bytes of a batch between two layers of it


@dataclass(frozen=True)
class Known:
    """A program, and the wire bytes that its busiest rank must send in a training step, by a formula."""

    run: Callable[[], None]
    wire_bytes: int
    formula: str


def mlp(layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.GELU()) for _ in range(layers)))


def train(model: nn.Module, inputs: Callable[[], Tensor], accumulate: int = 1) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(STEPS):
        for microbatch in range(accumulate):
            last = microbatch == accumulate - 1
            with nullcontext() if last else model.no_sync():  # type: ignore[operator]
                x = inputs()
                (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def batch() -> Tensor:
    return torch.randn(BATCH, D)


def mesh(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def ddp() -> None:
    train(DistributedDataParallel(mlp()), batch)


def ddp_small_buckets() -> None:
    """A bucket for each layer, and views of the buckets as gradients."""
    train(DistributedDataParallel(mlp(), bucket_cap_mb=0.004, gradient_as_bucket_view=True), batch)


def ddp_accumulated() -> None:
    """Gradients of two microbatches added up before they are reduced."""
    train(DistributedDataParallel(mlp()), batch, accumulate=2)


def sharded(over: DeviceMesh, **options: Any) -> None:
    model = mlp()
    for layer in model:
        fully_shard(layer, mesh=over, **options)  # type: ignore[arg-type]
    fully_shard(model, mesh=over)
    train(model, batch)


def fsdp2() -> None:
    sharded(mesh(dp=4))


def fsdp2_kept() -> None:
    """Weights kept since the forward pass: ZeRO-2."""
    sharded(mesh(dp=4), reshard_after_forward=False)


def hsdp() -> None:
    """Sharded over two ranks, replicated over two."""
    sharded(mesh(replicate=2, shard=2))


class Block(nn.Module):
    """A transformer's block without biases. q, k and v are three products."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(D) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.attention = Attention(self.q, self.k, self.v, self.o)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D, bias=False), nn.GELU(), nn.Linear(4 * D, D, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Attention(nn.Module):
    def __init__(self, *products: nn.Linear) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = products

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (product(x).unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for product in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


COLUMNS = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "mlp.0")}
ROWS = ("attention.o", "mlp.2")
BLOCKS = 2
ATTENDED = BATCH * TOKENS * D * FLOAT


def tokens(length: int = TOKENS) -> Callable[[], Tensor]:
    def same_everywhere() -> Tensor:
        return torch.ones(BATCH, length, D)

    return same_everywhere


def tensor_parallel() -> None:
    torch.manual_seed(0)
    model, over = nn.Sequential(*(Block() for _ in range(BLOCKS))), mesh(tp=4)
    for block in model:
        parallelize_module(block, over, {**COLUMNS, **{row: RowwiseParallel() for row in ROWS}})
    train(model, tokens())


def sequence_parallel() -> None:
    """Between the products the tokens are split: gathered before each pair of them, scattered sums after."""
    torch.manual_seed(0)
    model, over = nn.Sequential(*(Block() for _ in range(BLOCKS))), mesh(tp=4)
    gathered = {
        name: PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        for name in ("attention", "mlp")
    }
    rows = {row: RowwiseParallel(output_layouts=Shard(1)) for row in ROWS}
    columns = {name: ColwiseParallel(use_local_output=True) for name in COLUMNS}
    norms = {f"norms.{i}": SequenceParallel(use_local_output=True) for i in range(2)}
    for block in model:
        parallelize_module(block, over, {**norms, **gathered, **columns, **rows})
    train(model, tokens(TOKENS // 4))


def two_axes() -> None:
    """FSDP2 over dp around DTensor's tensor parallelism over tp."""
    torch.manual_seed(0)
    over = mesh(dp=2, tp=2)
    model = nn.Sequential(*(pair() for _ in range(2)))
    for each in model:
        parallelize_module(each, over["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(each, mesh=over["dp"])
    fully_shard(model, mesh=over["dp"])
    train(model, lambda: torch.ones(BATCH, D))


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 4 * D, bias=False), nn.GELU(), nn.Linear(4 * D, D, bias=False))


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def stages(per_rank: int) -> Iterator[PipelineStage]:
    rank, count = dist.get_rank(), dist.get_world_size() * per_rank
    layers = mlp(count)
    for number in range(rank, count, dist.get_world_size()):
        yield PipelineStage(layers[number], number, count, torch.device("cpu"))


def pipelined(schedule: Any, own: list[PipelineStage]) -> None:
    optimizer = torch.optim.AdamW([p for stage in own for p in stage.submod.parameters()], 1e-3)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for _ in range(STEPS):
        x = torch.ones(BATCH, D)
        if rank in (0, last):
            schedule.step(*[x] * (rank == 0), **{"target": x} if rank == last else {})
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()


def gpipe() -> None:
    [stage] = stages(1)
    pipelined(ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss), [stage])


def one_forward_one_backward() -> None:
    [stage] = stages(1)
    pipelined(Schedule1F1B(stage, n_microbatches=4, loss_fn=loss), [stage])


def interleaved() -> None:
    both = list(stages(2))
    pipelined(ScheduleInterleaved1F1B(both, n_microbatches=4, loss_fn=loss), both)  # type: ignore[arg-type]


F = D * 4 * D * FLOAT  # bytes of one weight of `pair`
PROGRAMS = {
    "ddp": Known(ddp, 2 * MLP * 3 // 4, "2 P (n-1)/n"),
    "ddp_small_buckets": Known(ddp_small_buckets, 2 * MLP * 3 // 4, "2 P (n-1)/n"),
    "ddp_accumulated": Known(ddp_accumulated, 2 * MLP * 3 // 4, "2 P (n-1)/n"),
    "fsdp2": Known(fsdp2, 3 * MLP * 3 // 4, "3 P (n-1)/n"),
    "fsdp2_kept": Known(fsdp2_kept, 2 * MLP * 3 // 4, "2 P (n-1)/n"),
    "hsdp": Known(hsdp, 3 * MLP // 2 + MLP // 2, "3 P (s-1)/s + 2 P/s (r-1)/r"),
    "tensor_parallel": Known(
        tensor_parallel, 6 * BLOCKS * 2 * ATTENDED * 3 // 4, "6 L all_reduces of A: those of q, k and v one by one"
    ),
    "sequence_parallel": Known(
        sequence_parallel,
        8 * BLOCKS * ATTENDED * 3 // 4 + 2 * BLOCKS * 3 * 2 * BIAS * 3 // 4,
        "8 L A (n-1)/n, and 2 L gains, each reduced 3 times, as AdamW reads it",
    ),
    "two_axes": Known(
        two_axes, 3 * 4 * F // 2 // 2 + 3 * 2 * ACTIVATIONS // 2, "3 P/t (d-1)/d, and 3 all_reduces of A over t"
    ),
    "gpipe": Known(gpipe, 2 * ACTIVATIONS, "2 A"),
    "one_forward_one_backward": Known(one_forward_one_backward, 2 * ACTIVATIONS, "2 A"),
    "interleaved": Known(interleaved, 4 * ACTIVATIONS, "4 A"),
}
