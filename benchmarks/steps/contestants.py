"""What takes turns in `shardiff bench steps` in torch: our step and its library equivalents, as contestants."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from benchmarks.steps import peers, peers_sharded
from benchmarks.steps.peers import Maker, Step
from contract.problem import Batch, Layer
from contract.strategy import Run
from torch_impl import train
from torch_impl.compose import loss_and_grads, own_gradients, split_params
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
}
CUT = ("pipelining", "dtensor_ddp")  # whose parameters are plain tensors and cut as ours are


class Contestant(NamedTuple):
    """A training step with what it holds.

    leaves: what the optimizer of this rank updates, or parts of it; their memory is that of all parameters that this
    rank holds. final: a rank's parameters in the order w0, b0, w1, ..., each w as [in, out], split as ours are.
    """

    step: Step
    leaves: list[Tensor]
    optimizer: torch.optim.Optimizer
    final: Callable[[], list[Tensor]]


def make(name: str, mesh: DeviceMesh, run: Run, device: torch.device) -> Contestant:
    """The contestant `name`: "torch" is ours, the others are in MAKERS."""
    return explicit(mesh, run, device) if name == "torch" else peer(name, mesh, run, device)


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

    return Contestant(step, [p for layer in trained for p in layer], optimizer, final)


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

    def final() -> list[Tensor]:
        gathered = [whole(p.detach()) for p in leaves]
        layers = [Layer(w.T, b) for w, b in zip(gathered[::2], gathered[1::2], strict=True)]
        if name not in CUT:
            layers = split_params(layers, of_device_mesh(mesh, run), run)
        return [p for layer in layers for p in layer]

    mine = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer, which wraps the one with the state
    return Contestant(update, leaves, mine, final)


def whole(p: Tensor) -> Tensor:
    """All of a DTensor, gathered over one axis after the other: at once, FSDP2's shards of tp's shards would warn."""
    if not isinstance(p, DTensor):
        return p
    for i in range(p.device_mesh.ndim):
        p = p.redistribute(placements=[*[Replicate()] * (i + 1), *p.placements[i + 1 :]])
    return p.to_local()
