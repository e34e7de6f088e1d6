"""The library equivalents in torch of what only a transformer has: ring attention, and experts on other ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.steps.peer_experts import SparseExperts
from benchmarks.steps.peer_models import full_model
from benchmarks.steps.peers import Step, replicated, step_of, tensor_parallel_model
from benchmarks.steps.torch_ring import ring_attention
from contract.problem import Batch
from contract.strategy import Run
from torch_impl.model import squared_error


def ring(mesh: DeviceMesh, run: Run, device: torch.device) -> tuple[Step, nn.Module]:
    """torch's private ring attention, in a model whose gradients DDP sums. Raises NotThere where torch has none."""
    attend = ring_attention(mesh.get_group("cp"), run.problem.dtype)
    model = replicated(tensor_parallel_model(mesh, run, device, attend), mesh, run)
    return step_of(model, mesh, run), model


def all_to_all(mesh: DeviceMesh, run: Run, device: torch.device) -> tuple[Step, nn.Module]:
    """The whole step over `ep`. Gradients of what every rank has are summed in one buffer after the backward pass."""
    group = mesh.get_group("ep")
    model = full_model(run, device, experts=lambda params, problem: SparseExperts(params, problem, group))
    split = {id(p) for module in model.modules() if isinstance(module, SparseExperts) for p in (module.up, module.down)}
    shared = [p for p in model.parameters() if id(p) not in split]

    def step(batch: Batch) -> Tensor:
        share = squared_error(model(batch.x), batch)
        share.backward()
        loss = share.detach()
        grads = [p.grad for p in shared if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
        dist.all_reduce(loss, group=group)
        return loss

    return step, model
