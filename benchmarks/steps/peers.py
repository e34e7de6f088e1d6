"""The library equivalents in torch: DistributedDataParallel, DTensor, torch.distributed.pipelining.

Each peer trains the same model on the same batches from the same weights, and ends with the same parameters; `shardiff
bench steps` times it and checks that. Those that shard parameters or optimizer state are in `peers_sharded`, those of
what only a transformer has in `peers_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.silent import SILENT
from benchmarks.steps.peer_models import Attend, full_model, scaled_dot_product
from contract.layout import schedule_of, unit_of
from contract.problem import Batch, split_slices
from contract.strategy import Run
from contract.transformer import Transformer
from torch_impl import train
from torch_impl.model import squared_error

Step = Callable[[Batch], Tensor]  # a rank's batch -> the global loss, before the update that the step ends with
Maker = Callable[[DeviceMesh, Run, torch.device], tuple[Step, nn.Module]]


def optimizer_of(model: nn.Module, mesh: DeviceMesh, run: Run) -> torch.optim.Optimizer:
    """The optimizer of `torch_impl.train`, over a module's parameters. A fused one takes DTensors alone or none."""
    kind, settings = train.optimizer_kind(run)
    by_kind: dict[bool, list[Tensor]] = {}
    for p in model.parameters():
        by_kind.setdefault(isinstance(p, DTensor), []).append(p)
    return kind([{"params": params} for params in by_kind.values()], **settings)


def data_axes(run: Run) -> list[str]:
    """The axes of a run over which samples or the sequence are split, and the model is not."""
    return [name for name in run.mesh.names if name in ("dp", "fsdp", "cp")]


def groups_of_loss(mesh: DeviceMesh, run: Run) -> list[ProcessGroup]:
    """The groups over which the loss is a sum: all of them, but that of Megatron's layers, whose output is whole."""
    return [mesh.get_group(axis.name) for axis in run.axes if axis.strategy != "megatron_tensor_parallel"]


def step_of(model: nn.Module, mesh: DeviceMesh, run: Run) -> Step:
    """Forward and backward pass. DDP and FSDP2 take the mean over ranks, so a rank's share of the loss is scaled up."""
    groups, ranks = groups_of_loss(mesh, run), prod(mesh[name].size() for name in data_axes(run))

    def step(batch: Batch) -> Tensor:
        share = squared_error(model(batch.x), batch)
        (share * ranks if ranks > 1 else share).backward()
        loss = share.detach()
        for group in groups:
            dist.all_reduce(loss, group=group)
        return loss

    return step


def modules(mesh: DeviceMesh, run: Run, device: torch.device) -> tuple[Step, nn.Module]:
    """torch's modules on one device."""
    model = full_model(run, device)
    return step_of(model, mesh, run), model


def dtensor(mesh: DeviceMesh, run: Run, device: torch.device) -> tuple[Step, nn.Module]:
    """DTensor's parallelize_module, with the layouts of the strategy of the axis `tp`."""
    model = tensor_parallel_model(mesh, run, device)
    return step_of(model, mesh, run), model


def tensor_parallel_model(
    mesh: DeviceMesh, run: Run, device: torch.device, attend: Attend = scaled_dot_product
) -> nn.Module:
    """The model, cut by DTensor if the run has an axis `tp`. This is what DDP and FSDP2 wrap."""
    model = full_model(run, device, attend=attend)
    if "tp" in run.mesh.names:
        of_transformer = isinstance(run.problem, Transformer)
        parallelize_module(model, mesh["tp"], styles_of_blocks(run) if of_transformer else styles_of_layers(run))
    return model


def styles_of_layers(run: Run) -> dict[str, ParallelStyle]:
    """How DTensor cuts the layers of the MLP: all by columns, or by columns and rows in turn."""

    def style(i: int) -> ParallelStyle:
        if "tensor_parallel" in run.strategies:
            return ColwiseParallel(input_layouts=Shard(-1) if i else Replicate(), output_layouts=Shard(-1))
        return RowwiseParallel() if i % 2 else ColwiseParallel()

    return {f"layers.{i}.0": style(i) for i in range(run.problem.layers)}


def styles_of_blocks(run: Run) -> dict[str, ParallelStyle]:
    """How DTensor cuts blocks: heads and features; with sequence_parallel, norms and residuals by the sequence."""
    split = "sequence_parallel" in run.strategies
    styles: dict[str, ParallelStyle] = {}
    for i in range(run.problem.layers):
        columns = ("attention.q", "attention.k", "attention.v", "mlp.0")
        styles |= {f"layers.{i}.{name}": ColwiseParallel() for name in columns}
        rows = {"output_layouts": Shard(1)} if split else {}
        styles |= {f"layers.{i}.{name}": RowwiseParallel(**rows) for name in ("attention.o", "mlp.2")}
        for name in ("attention", "mlp") if split else ():
            styles[f"layers.{i}.{name}_norm"] = SequenceParallel()
            gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            styles[f"layers.{i}.{name}"] = gathered
    return styles


def distributed_data_parallel(mesh: DeviceMesh, run: Run, device: torch.device) -> tuple[Step, nn.Module]:
    """DDP (Li et al., 2006.15704)."""
    model = replicated(tensor_parallel_model(mesh, run, device), mesh, run)
    return step_of(model, mesh, run), model


def replicated(inside: nn.Module, mesh: DeviceMesh, run: Run) -> DistributedDataParallel:
    """DDP around a model, over the axis along which it is replicated."""
    [axis] = data_axes(run)
    model = DistributedDataParallel(inside, device_mesh=mesh[axis], gradient_as_bucket_view=True)
    if dist.get_backend(mesh.get_group(axis)) == SILENT:  # whose results DDP would not take
        model.register_comm_hook(None, as_it_is)
    return model


def as_it_is(state, bucket):  # DDP looks at annotations, and would not take them as the strings that they are here
    """DDP's hook for a group that sends nothing: the bucket without a reduction."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTIPLE = {
    "interleaved": ScheduleInterleaved1F1B,
    "zb_h1": ScheduleInterleavedZeroBubble,  # of one chunk a stage
    "zb_v": ScheduleZBVZeroBubble,
}


def pipelining(mesh: DeviceMesh, run: Run, device: torch.device) -> tuple[Step, nn.Module]:
    """torch.distributed.pipelining's own schedule over the same parts and microbatches, which it must divide."""
    rank, group, schedule = mesh.get_local_rank(), mesh.get_group(), schedule_of(run)
    assert schedule is not None
    mine = [schedule.parts.index((rank, chunk)) for chunk in range(schedule.chunks)]
    unit = unit_of(run)
    cuts = split_slices(run.problem.depth // unit, len(schedule.parts))
    models = [full_model(run, device, slice(unit * cuts[i].start, unit * cuts[i].stop)) for i in mine]
    weight = 1 / (run.problem.batch * run.problem.sequence * run.problem.width)
    wide = torch.float64 if run.problem.dtype == "float64" else torch.float32
    stages: list[Any] = [
        PipelineStage(model, part, len(schedule.parts), device, group=group)
        for model, part in zip(models, mine, strict=True)
    ]

    def share_of_loss(out: Tensor, y: Tensor) -> Tensor:
        return weight * (out - y).to(wide).square().sum()

    how: dict[str, Any] = {"loss_fn": share_of_loss, "scale_grads": False}
    if run.schedule in SINGLE:
        theirs: Any = SINGLE[run.schedule](stages[0], run.microbatches, **how)
    else:
        theirs = MULTIPLE[run.schedule](stages, run.microbatches, **how)
    first, last = 0 in mine, len(schedule.parts) - 1 in mine

    def step(batch: Batch) -> Tensor:
        losses: list[Tensor] = []
        inputs = (batch.x,) if first else ()
        theirs.step(*inputs, **({"target": batch.y, "losses": losses} if last else {}))
        loss = torch.stack(losses).sum().detach() if losses else batch.weight.new_zeros(())
        dist.all_reduce(loss, group=group)
        return loss

    return step, nn.ModuleList(models)
