"""The library equivalents in torch: DistributedDataParallel, FSDP2, DTensor, torch.distributed.pipelining.

Each peer trains the same model on the same batches from the same weights, and ends with the same parameters; `shardiff
bench steps` times it and checks that. FSDP2 is there for context: it does not do what our strategies do, but is used
because it needs less memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from contract.layout import schedule_of
from contract.problem import Batch, Layer, split_slices
from contract.strategy import Run
from torch_impl import train
from torch_impl.compose import loss_and_grads
from torch_impl.mesh import of_device_mesh
from torch_impl.model import squared_error

Step = Callable[[Batch], Tensor]  # a rank's batch -> the global loss, before the update that the step ends with


class Contestant(NamedTuple):
    """A training step with what it holds. leaves: the parameters, as this rank holds them; transposed: as [out, in]."""

    step: Step
    leaves: list[Tensor]
    optimizer: torch.optim.Optimizer
    transposed: bool

    def final(self) -> list[Tensor]:
        """This rank's parameters in the order w0, b0, w1, ..., each w as [in, out]; whole where FSDP2 shards them."""
        return [p.T if self.transposed and p.ndim == 2 else p for p in map(_gathered, self.leaves)]


def _gathered(p: Tensor) -> Tensor:
    if not isinstance(p, DTensor):
        return p.detach()
    return (p.full_tensor() if p.device_mesh.mesh_dim_names == FSDP_MESH else p.to_local()).detach()


SILENT = "fake"  # torch's backend whose collectives return at once
FSDP_MESH = ("dp",)  # of DTensors only FSDP2's lie on a dp mesh, and they are shards of what ours holds whole


class MLP(nn.Module):
    """The same model from torch's own modules. params: layers of w[in, out] and b[out], as everywhere else."""

    def __init__(self, params: list[Layer]):
        super().__init__()
        self.layers = nn.ModuleList()
        for w, b in params:
            linear = nn.Linear(*w.shape, device="meta")
            linear.weight, linear.bias = nn.Parameter(w.T.contiguous()), nn.Parameter(b.clone())
            self.layers.append(linear)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


def full_model(run: Run, device: torch.device, layers: slice = slice(None)) -> MLP:
    """The model with the initial parameters, or some of its layers."""
    tensors = [Layer(*(train.tensor(a, run.problem.dtype) for a in layer)) for layer in run.problem.parameters()]
    return MLP(tensors[layers]).to(device)


def optimizer_of(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    """The optimizer of `torch_impl.train`, over a module's parameters."""
    return train.make_optimizer([tuple(model.parameters())], run)  # type: ignore[list-item]


def explicit(mesh: DeviceMesh, run: Run, device: torch.device) -> Contestant:
    """Ours."""
    ours = of_device_mesh(mesh, run)
    params = train.make_params(ours, run, device)
    optimizer = train.make_optimizer(params, run)

    def step(batch: Batch) -> Tensor:
        loss, grads = loss_and_grads(params, batch, ours, run)
        train.update(optimizer, params, grads)
        return loss

    return Contestant(step, [p for layer in params for p in layer], optimizer, transposed=False)


def peer(name: str, mesh: DeviceMesh, run: Run, device: torch.device) -> Contestant:
    """Theirs. The loss is the global one too, by the same scalar all_reduce where it needs one."""
    makers = {
        "modules": modules,
        "ddp": distributed_data_parallel,
        "fsdp2": fsdp2,
        "dtensor": dtensor,
        "pipelining": pipelining,
    }
    step, model = makers[name](mesh, run, device)
    optimizer = optimizer_of(model, run)

    def update(batch: Batch) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = step(batch)
        optimizer.step()
        return loss

    return Contestant(update, list(model.parameters()), optimizer, transposed=True)


def modules(mesh: DeviceMesh, run: Run, device: torch.device) -> tuple[Step, nn.Module]:
    """torch's modules on one device."""
    model = full_model(run, device)

    def step(batch: Batch) -> Tensor:
        loss = squared_error(model(batch.x), batch)
        loss.backward()
        return loss.detach()

    return step, model


def distributed_data_parallel(mesh: DeviceMesh, run: Run, device: torch.device) -> tuple[Step, nn.Module]:
    """DDP (Li et al., 2006.15704). It takes the mean over ranks, so a rank's share of the loss is scaled up first."""
    group = mesh.get_group()
    model = DistributedDataParallel(full_model(run, device), process_group=group, gradient_as_bucket_view=True)
    if dist.get_backend(group) == SILENT:  # whose results DDP would not take
        model.register_comm_hook(None, as_it_is)

    def step(batch: Batch) -> Tensor:
        share = squared_error(model(batch.x), batch)
        (share * run.world_size).backward()
        loss = share.detach()
        dist.all_reduce(loss, group=group)
        return loss

    return step, model


def as_it_is(state, bucket):  # DDP looks at annotations, and would not take them as the strings that they are here
    """DDP's hook for a group that sends nothing: the bucket without a reduction."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def fsdp2(mesh: DeviceMesh, run: Run, device: torch.device) -> tuple[Step, nn.Module]:
    """FSDP2 (Zhao et al., 2304.11277; ZeRO-3, 1910.02054), every layer a unit. It takes the mean over ranks, as DDP."""
    model, group = full_model(run, device), mesh.get_group()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def step(batch: Batch) -> Tensor:
        share = squared_error(model(batch.x), batch)
        (share * run.world_size).backward()
        loss = share.detach()
        dist.all_reduce(loss, group=group)
        return loss

    return step, model


def dtensor(mesh: DeviceMesh, run: Run, device: torch.device) -> tuple[Step, nn.Module]:
    """DTensor's parallelize_module, with the layouts of tensor_parallel or megatron_tensor_parallel."""
    model, group = full_model(run, device), mesh.get_group()
    split = run.strategy == "tensor_parallel"

    def style(i: int) -> ParallelStyle:
        if split:
            return ColwiseParallel(input_layouts=Shard(-1) if i else Replicate(), output_layouts=Shard(-1))
        return RowwiseParallel() if i % 2 else ColwiseParallel()

    parallelize_module(model, mesh, {f"layers.{i}": style(i) for i in range(run.problem.layers)})

    def step(batch: Batch) -> Tensor:
        share = squared_error(model(batch.x), batch)
        share.backward()
        loss = share.detach()
        if split:
            dist.all_reduce(loss, group=group)
        return loss

    return step, model


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
    cuts = split_slices(run.problem.layers, len(schedule.parts))
    models = [full_model(run, device, cuts[part]) for part in mine]
    weight = 1 / (run.problem.batch * run.problem.width)
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
