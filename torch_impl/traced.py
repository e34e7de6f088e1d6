"""What one step of a strategy communicates, traced over all its ranks."""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist

from contract.layout import layout
from contract.share import names as names_of
from contract.strategy import Run
from shardiff.ranks.supervisor import Workers
from shardiff.ranks.torch_pool import run_on_ranks
from shardiff.record import Record
from shardiff.tracing.calls import Call
from shardiff.tracing.merge import merge
from torch_impl.compose import loss_and_grads, own_gradients, split_params
from torch_impl.mesh import make_mesh
from torch_impl.train import make_batch, make_leaves, make_own_optimizer, update

TRACER = "shardiff.tracing.tracer"  # takes more than a second to import, and only ranks need it
BEFORE_FORK = (TRACER, "torch._dynamo")  # the second one for the optimizer


def trace_run(run: Run, workers: Workers | None = None) -> list[Record]:
    """What one training step of a torch strategy communicates, over all its ranks. workers: as in `train.run`.

    Raises MismatchError if the ranks disagree.
    """
    if workers is None:
        importlib.import_module(TRACER)  # under torchrun, this process is a rank; later there is a process group
        ranks = run_on_ranks(trace_rank, run, world_size=run.world_size, device=run.device)
    else:
        ranks = workers.call(trace_rank, run, world_size=run.world_size)
    return run.mesh.named(merge(ranks))


def trace_rank(device: torch.device, run: Run) -> list[Call]:
    """What every rank runs: it returns the calls of one step."""
    mesh = make_mesh(run, device)
    # Values do not matter here, and a full model takes time to draw.
    zero = torch.zeros((), dtype=getattr(torch, run.problem.dtype))
    full = [layer._make(zero.expand(shape) for shape in layer) for layer in run.problem.shapes()]
    params = make_leaves(split_params(full, mesh, run), device)
    batch = make_batch(mesh, run, 0, device)
    parts = layout(run)[dist.get_rank()]
    named = dict(
        pair for part, layer in zip(parts, params, strict=True) for pair in zip(names_of(part), layer, strict=True)
    )
    optimizer, trained = make_own_optimizer(params, mesh, run)
    with importlib.import_module(TRACER).capture(named) as calls:
        _, grads = loss_and_grads(params, batch, mesh, run)
        update(optimizer, trained, own_gradients(grads, mesh, run))
    return calls
