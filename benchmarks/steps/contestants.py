"""What takes turns in `shardiff bench steps` in torch: our step and its library equivalents, as contestants."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from benchmarks.documents.steps import OFFLOAD
from benchmarks.steps import peers, peers_blocks, peers_sharded
from benchmarks.steps.numbers import run_of
from benchmarks.steps.peers import Maker, Step
from contract.problem import Batch
from contract.strategy import Run
from torch_impl import train
from torch_impl.compose import loss_and_grads, own, own_gradients, split_params
from torch_impl.mesh import of_device_mesh

MAKERS: dict[str, Maker] = {
    "modules": peers.modules,
    "ddp": peers.distributed_data_parallel,
    "dtensor": peers.dtensor,
    "dtensor_ddp": peers.distributed_data_parallel,
    "pipelining": peers.pipelining,
    "fsdp2": peers_sharded.fsdp2,
    "dtensor_fsdp2": peers_sharded.fsdp2,
    "ddp_zero": peers.distributed_data_parallel,
    "ddp_ring": peers_blocks.ring,
    "all_to_all": peers_blocks.all_to_all,
}
CUT = ("pipelining", "dtensor_ddp", "all_to_all")  # whose parameters are plain tensors and cut as ours are


class Contestant(NamedTuple):
    """A training step with what it holds.

    leaves: what the optimizer of this rank updates, or parts of it; their memory is that of all parameters that this
    rank holds. final: a rank's parameters in the order w0, b0, w1, ..., each w as [in, out], split as ours are.
    gradients: of the last step, of what this rank updates, in the same form.
    """

    step: Step
    leaves: list[Tensor]
    optimizer: torch.optim.Optimizer
    final: Callable[[], list[Tensor]]
    gradients: Callable[[], list[Tensor]]


def make(name: str, mesh: DeviceMesh, run: Run, device: torch.device) -> Contestant:
    """The contestant `name`: "torch", also with what it recomputes, is ours; the others are in MAKERS."""
    if name in MAKERS:
        return peer(name, mesh, run, device)
    ours = explicit(mesh, run_of(run, name), device)
    return offloaded(ours) if name.endswith(OFFLOAD) else ours


def offloaded(contestant: Contestant) -> Contestant:
    """The contestant whose forward pass moves what its backward pass needs to the host's memory, parameters as well."""

    def step(batch: Batch) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return contestant.step(batch)

    return contestant._replace(step=step)


def explicit(mesh: DeviceMesh, run: Run, device: torch.device) -> Contestant:
    """Ours."""
    ours = of_device_mesh(mesh, run)
    params = train.make_params(ours, run, device)
    optimizer, trained = train.make_own_optimizer(params, ours, run)

    def step(batch: Batch) -> Tensor:
        loss, grads = loss_and_grads(params, batch, ours, run)
        train.update(optimizer, trained, own_gradients(grads, ours, run))
        return loss

    def final() -> list[Tensor]:
        return [p.detach() for layer in params for p in layer]

    def gradients() -> list[Tensor]:
        return [p.grad for layer in trained for p in layer if p.grad is not None]

    return Contestant(step, [p for layer in trained for p in layer], optimizer, final, gradients)


def peer(name: str, mesh: DeviceMesh, run: Run, device: torch.device) -> Contestant:
    """Theirs. The loss is the global one too, by the same scalar all_reduce where it needs one."""
    step, model = MAKERS[name](mesh, run, device)
    leaves: list[Tensor] = [*model.parameters()]
    make_optimizer = peers_sharded.zero_optimizer if name == "ddp_zero" else peers.optimizer_of
    optimizer = make_optimizer(model, mesh, run)

    def update(batch: Batch) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = step(batch)
        optimizer.step()
        return loss

    ours = of_device_mesh(mesh, run)

    def cut(tensors: list[Tensor]) -> list[Any]:
        """Layers, split as ours are, from tensors of the leaves."""
        left = (p.T if p.ndim == 2 else p for p in map(whole, tensors))  # w of nn.Linear is [out, in]
        if name in CUT:
            return [tuple(left)]
        return split_params([shapes._make(islice(left, len(shapes))) for shapes in run.problem.shapes()], ours, run)

    def final() -> list[Tensor]:
        return [p for layer in cut([p.detach() for p in leaves]) for p in layer]

    def gradients() -> list[Tensor]:
        layers = cut([p.grad for p in leaves if p.grad is not None])
        return [p for layer in (layers if name in CUT else own(layers, ours, run)) for p in layer]

    mine = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer, which wraps the one with the state
    return Contestant(update, leaves, mine, final, gradients)


def whole(p: Tensor) -> Tensor:
    """All of a DTensor, gathered over one axis after the other: at once, FSDP2's shards of tp's shards would warn."""
    if not isinstance(p, DTensor):
        return p
    for i in range(p.device_mesh.ndim):
        p = p.redistribute(placements=[*[Replicate()] * (i + 1), *p.placements[i + 1 :]])
    return p.to_local()
