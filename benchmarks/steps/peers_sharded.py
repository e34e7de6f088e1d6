"""The library equivalents in torch that shard what a rank holds: FSDP2's fully_shard and ZeroRedundancyOptimizer.

FSDP2 is also there for context: beside data_parallel, whose gradients it sums with less memory, and beside zero2. With
reshard_after_forward=False it moves in the forward and backward pass what zero2 moves in a step, but it stores shards
of the parameters and gathers them before the next forward pass, where zero2 gathers what it has updated.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks.steps.peers import Step, data_axes, step_of, tensor_parallel_model
from contract.strategy import Run
from torch_impl import train


def fsdp2(mesh: DeviceMesh, run: Run, device: torch.device) -> tuple[Step, nn.Module]:
    """FSDP2 (Zhao et al., 2304.11277; ZeRO-3, 1910.02054), a unit for every layer of an MLP, or block.

    Over dp and fsdp it is HSDP.
    """
    model, names = tensor_parallel_model(mesh, run, device), data_axes(run)
    over = mesh[tuple(names)] if len(names) > 1 else mesh[names[0]]
    reshard = run.gathered_again if "fully_sharded" in run.strategies else "zero2" not in run.strategies
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=over, reshard_after_forward=reshard)
    fully_shard(model, mesh=over, reshard_after_forward=reshard)
    return step_of(model, mesh, run), model


def zero_optimizer(model: nn.Module, mesh: DeviceMesh, run: Run) -> torch.optim.Optimizer:
    """ZeroRedundancyOptimizer over DDP's parameters: every rank updates some of them, and then broadcasts them."""
    from benchmarks.steps.zero import ZeroRedundancyOptimizer  # which takes long to import

    kind, settings = train.optimizer_kind(run)
    group = mesh.get_group(*data_axes(run))
    return ZeroRedundancyOptimizer(
        model.parameters(), kind, process_group=group, parameters_as_bucket_view=True, **settings
    )
