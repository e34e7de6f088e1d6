"""What a user of torch would pick instead: DistributedDataParallel, DTensor, torch.distributed.pipelining.

Each peer trains the same model on the same batches from the same weights, and ends with the same parameters.
`python -m benchmarks.peers` times every explicit strategy and its peer step by step in turn, in the same processes.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from contract.problem import Batch, Layer, Problem, split_slices
from contract.strategy import AXES, STRATEGIES, Run
from torch_impl import train
from torch_impl.launch import run_on_ranks
from torch_impl.model import squared_error

Step = Callable[[Batch], Tensor]  # a rank's batch -> the global loss, before the update that the step ends with


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


def explicit(mesh: DeviceMesh, run: Run, device: torch.device) -> tuple[Step, Callable[[], list[Tensor]]]:
    """Ours: the step, and what gives this rank's parameters in the order w0, b0, w1, ..."""
    strategy = importlib.import_module(f"torch_impl.{run.strategy}")
    params = train.make_params(strategy, mesh, run, device)
    optimizer = train.make_optimizer(params, run)

    def step(batch: Batch) -> Tensor:
        loss, grads = strategy.loss_and_grads(params, batch, mesh, run)
        train.update(optimizer, params, grads)
        return loss

    return step, lambda: [p.detach() for layer in params for p in layer]


def peer(mesh: DeviceMesh, run: Run, device: torch.device) -> tuple[Step, Callable[[], list[Tensor]]]:
    """Theirs, in the same form. The loss is the global one too, by the same scalar all_reduce where it needs one."""
    makers = {
        "data_parallel": distributed_data_parallel,
        "tensor_parallel": dtensor,
        "megatron_tensor_parallel": dtensor,
        "pipeline_parallel": pipelining,
    }
    step, model = makers[run.strategy](mesh, run, device)
    optimizer = optimizer_of(model, run)

    def update(batch: Batch) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = step(batch)
        optimizer.step()
        return loss

    def params() -> list[Tensor]:
        local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        return [p.detach().T if p.ndim == 2 else p.detach() for p in local]

    return update, params


def distributed_data_parallel(mesh: DeviceMesh, run: Run, device: torch.device) -> tuple[Step, nn.Module]:
    """DDP (Li et al., 2006.15704). It takes the mean over ranks, so a rank's share of the loss is scaled up first."""
    group = mesh.get_group()
    model = DistributedDataParallel(full_model(run, device), process_group=group, gradient_as_bucket_view=True)

    def step(batch: Batch) -> Tensor:
        share = squared_error(model(batch.x), batch)
        (share * run.degree).backward()
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


def pipelining(mesh: DeviceMesh, run: Run, device: torch.device) -> tuple[Step, nn.Module]:
    """torch.distributed.pipelining's GPipe schedule over the same stages and microbatches, which it must divide."""
    rank, group, last = mesh.get_local_rank(), mesh.get_group(), run.degree - 1
    model = full_model(run, device, split_slices(run.problem.layers, run.degree)[rank])
    weight = 1 / (run.problem.batch * run.problem.width)
    stage = PipelineStage(model, rank, run.degree, device, group=group)
    schedule = ScheduleGPipe(
        stage, run.microbatches, loss_fn=lambda out, y: weight * (out - y).square().sum(), scale_grads=False
    )

    def step(batch: Batch) -> Tensor:
        losses: list[Tensor] = []
        inputs = (batch.x,) if rank == 0 else ()
        schedule.step(*inputs, **({"target": batch.y, "losses": losses} if rank == last else {}))
        loss = torch.stack(losses).sum().detach() if losses else batch.weight.new_zeros(())
        dist.all_reduce(loss, group=group)
        return loss

    return step, model


def compare(device: torch.device, runs: list[Run], iterations: int, warmup: int = 5) -> list[dict[str, list[float]]]:
    """On every rank: for each run, the seconds of each iteration, ours and the peer's, all of them taken in turn.

    Raises AssertionError if ours and the peer's losses or parameters differ by more than float32 rounding.
    """
    contestants, seconds = [], []
    for run in runs:
        mesh = init_device_mesh(device.type, (run.degree,), mesh_dim_names=(AXES[run.strategy],))
        strategy = importlib.import_module(f"torch_impl.{run.strategy}")
        batch = train.make_batch(strategy, mesh, run, 0, device)
        contestants.append((batch, {"explicit": explicit(mesh, run, device), "peer": peer(mesh, run, device)}))
        seconds.append({"explicit": [], "peer": []})
    for iteration in range(warmup + iterations):
        for (batch, pair), taken in zip(contestants, seconds, strict=True):
            losses = {}
            for name in sorted(pair, reverse=iteration % 2 == 1):
                dist.barrier()
                start = time.perf_counter()
                losses[name] = pair[name][0](batch)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if iteration >= warmup:
                    taken[name].append(time.perf_counter() - start)
            torch.testing.assert_close(losses["explicit"], losses["peer"], rtol=1e-4, atol=0)
    for _, pair in contestants:
        for ours, theirs in zip(pair["explicit"][1](), pair["peer"][1](), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    return seconds


def main(
    degree: list[int] = [2, 4], iterations: int = 40, batch: int = 128, width: int = 1024, layers: int = 4
) -> None:
    """Print, for every strategy and degree, the median step of both, and the median of the ratios of adjacent steps."""
    print("strategy                  ranks  explicit ms  peer ms  ratio  (quartiles)")
    for n in degree:
        runs = [Run("torch", s, n, Problem(batch, width, layers)) for s in STRATEGIES]
        ranks = run_on_ranks(compare, runs, iterations, world_size=n, device="cpu")
        for i, run in enumerate(runs):
            ours, theirs = ([max(r[i][k][j] for r in ranks) for j in range(iterations)] for k in ("explicit", "peer"))
            ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
            quartiles = statistics.quantiles(ratios)
            print(
                f"{run.strategy:25} {n:5}  {1e3 * statistics.median(ours):11.1f} {1e3 * statistics.median(theirs):8.1f}"
                f"  {quartiles[1]:5.2f}  ({quartiles[0]:.2f} to {quartiles[2]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
