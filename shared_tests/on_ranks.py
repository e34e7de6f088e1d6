"""What tests run on the ranks of a pool. The module is small, because every rank imports it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from contract.strategy import Run
from shardiff.record import Record
from shardiff.tracing.merge import merge
from shared_tests.edited import Edit, put_in_place
from shared_tests.looks import Look, looking

# What the ranks of any test import: once, in the process from which they are forked.
BEFORE_FORK = ("torch_impl.train", "torch_impl.traced", "shardiff.tracing.tracer", "benchmarks.steps.torch")


def nothing(device: torch.device) -> None:
    """Called once, it has BEFORE_FORK imported."""


def train_edited(device: torch.device, run: Run, module: str, edits: Sequence[Edit]) -> Any:
    """`torch_impl.train.train` with one module edited, permanently: a rank lives for one call."""
    put_in_place(module, edits)
    return importlib.import_module("torch_impl.train").train(device, run)


def every(device: torch.device, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """`function(device, *arguments)` for the arguments of each of several calls.

    They share one start of the ranks, and the process groups of meshes that are alike.
    """
    from torch_impl import mesh

    make, made = mesh.make_device_mesh, {}

    def make_once(run: Run, device: torch.device) -> Any:
        if run.mesh not in made:
            made[run.mesh] = make(run, device)
        return made[run.mesh]

    mesh.make_device_mesh = make_once  # permanently: a rank lives for one call
    return [function(device, *arguments) for arguments in calls]


def traced(runs: Sequence[Run], pool: Any) -> dict[Run, list[Record]]:
    """`torch_impl.traced.trace_run` of every run: one call of the pool for all that have as many ranks."""
    from torch_impl.traced import trace_rank

    found = {}
    for size in {run.world_size for run in runs}:
        of_size = [run for run in runs if run.world_size == size]
        ranks = pool.call(every, trace_rank, [(run,) for run in of_size], world_size=size)
        found.update({run: run.mesh.named(merge(calls)) for run, *calls in zip(of_size, *ranks, strict=True)})
    return found


def train_with_buckets(device: torch.device, run: Run, limit: int) -> Any:
    """`torch_impl.train.train` with data_parallel's buckets of `limit` bytes."""
    from torch_impl import buckets, train

    buckets.make_buckets = functools.partial(buckets.make_buckets, limit=limit)
    return train.train(device, run)


def train_looking(device: torch.device, run: Run, every: int) -> tuple[Any, list[Look]]:
    """`torch_impl.train.train`, and what this rank held before every `every`th step."""
    from torch_impl import train

    with looking(train, every) as looks:
        return train.train(device, run), looks


def loss_alone(device: torch.device, run: Run) -> float:
    """What the strategy's `loss` returns for the initial parameters and the first batch."""
    from torch_impl import compose, train
    from torch_impl.mesh import make_mesh

    mesh = make_mesh(run, device)
    params = train.make_params(mesh, run, device)
    return compose.loss(params, train.make_batch(mesh, run, 0, device), mesh, run).item()


def passes(device: torch.device, runs: Sequence[Run], traced: bool = False) -> list[tuple[float, Any, int, Any]]:
    """Of each run's first step: the loss, this rank's gradients, the most bytes kept, and the calls, if traced."""
    from benchmarks.memory_torch import kept_for_backward
    from shardiff.tracing.tracer import capture
    from torch_impl import train
    from torch_impl.compose import loss_and_grads
    from torch_impl.mesh import make_device_mesh, of_device_mesh

    meshes: dict[Any, Any] = {}
    results = []
    for run in runs:
        if run.mesh not in meshes:
            meshes[run.mesh] = make_device_mesh(run, device)
        mesh, kept, got = of_device_mesh(meshes[run.mesh], run), {}, []
        params, batch = train.make_params(mesh, run, device), train.make_batch(mesh, run, 0, device)

        def step(params=params, batch=batch, mesh=mesh, run=run, kept=kept, got=got) -> None:
            got[:] = loss_and_grads(params, batch, mesh, run, kept=kept)

        def put_off(kept=kept) -> int:
            return sum(passage.put_off_bytes() for passage in kept.values())

        if traced:
            with capture() as calls:
                step()
            results.append((0.0, [], 0, calls))
            continue
        most = kept_for_backward(step, [*(p for layer in params for p in layer), *batch], put_off)
        owns = [[True] * len(layer) for layer in params]
        results.append((got[0].item(), train.to_numpy(got[1], owns), most or 0, None))
    return results


def held(device: torch.device, runs: Sequence[Run]) -> list[tuple[int, int, int | None]]:
    """The bytes that this rank holds in a step of each run: parameters, gradients, and what the backward pass needs."""
    from benchmarks.memory_torch import kept_for_backward, nbytes
    from torch_impl.compose import loss_and_grads
    from torch_impl.mesh import make_mesh
    from torch_impl.train import make_batch, make_params

    found = []
    for run in runs:
        mesh = make_mesh(run, device)
        params, batch = make_params(mesh, run, device), make_batch(mesh, run, 0, device)
        leaves, grads = [p for layer in params for p in layer], []

        def step(params=params, batch=batch, mesh=mesh, run=run, grads=grads) -> None:
            grads.extend(loss_and_grads(params, batch, mesh, run)[1])

        kept = kept_for_backward(step, [*leaves, *batch])
        found.append((nbytes(leaves), nbytes(g for layer in grads for g in layer), kept))
    return found


Value = tuple[str, np.ndarray] | None  # dtype and values; bfloat16 is widened to float32


def collectives(
    device: torch.device, op: str, cases: Sequence[tuple[dict[str, Any], list[np.ndarray]]], laid_out: str = "by rows"
) -> list[Value]:
    """The collective `op` for each (arguments, every rank's array) of `cases`.

    laid_out: how rank 0's tensor lies in memory; that of all others lies there row by row.
    """
    from torch_impl import collectives

    rank, world, results = dist.get_rank(), dist.group.WORLD, []
    for arguments, arrays in cases:
        x = tensor(arrays[rank])
        x = LAYOUTS[laid_out](x) if rank == 0 else x
        if op == "scatter":
            like = x[: len(x) // dist.get_world_size()]
            x = x if rank == arguments["root"] else None
            results.append(value(collectives.scatter(x, group=world, like=like, **arguments)))
        else:
            results.append(value(getattr(collectives, op)(x, group=world, **arguments)))
    return results


def compositions(device: torch.device, arrays: list[np.ndarray]) -> dict[str, tuple[Value, Value]]:
    """name -> (a collective, what composes it) of this rank's array."""
    from torch_impl import collectives as c

    world, x = dist.group.WORLD, tensor(arrays[dist.get_rank()])
    block = x[: len(x) // dist.get_world_size()]
    gathered = c.gather(x, 0, world)
    scattered = c.scatter(x if dist.get_rank() == 0 else None, 0, world, like=block)
    whole = x.repeat(dist.get_world_size(), 1) if gathered is None else gathered
    pairs = {
        "all_reduce": (c.all_reduce(x.clone(), world), c.all_gather(c.reduce_scatter(x, world), world)),
        "broadcast": (c.broadcast(x.clone(), 0, world), c.all_gather(scattered, world)),
        "all_gather": (c.all_gather(x, world), c.broadcast(whole, 0, world)),
        "reduce": (c.reduce(x.clone(), 0, world), c.gather(c.reduce_scatter(x, world), 0, world)),
        "all_to_all": (x, c.all_to_all(c.all_to_all(x, world), world)),
    }
    return {name: (value(one), value(other)) for name, (one, other) in pairs.items()}


def pair(
    device: torch.device, name: str, rest: dict[str, Any], xs: list[np.ndarray], ys: list[np.ndarray], strided: bool
) -> tuple[Value, Value, bool]:
    """Output and gradient of an autograd pair at this rank's x and output gradient y; whether both are left alone.

    strided: x and y lie in memory column by column.
    """
    from torch_impl import collectives

    def laid_out(array: np.ndarray) -> torch.Tensor:
        t = tensor(array)
        return t.t().contiguous().t() if strided else t

    x, y = laid_out(xs[dist.get_rank()]), laid_out(ys[dist.get_rank()])
    leaf, given = x.clone().requires_grad_(), y.clone()
    out = getattr(collectives, name)(leaf, dist.group.WORLD, **rest)
    got = value(out)
    out.backward(given)
    return got, value(leaf.grad), torch.equal(leaf, x) and torch.equal(given, y)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "by rows": lambda t: t,
    "by columns": lambda t: t.t().contiguous().t(),
    "with gaps": lambda t: torch.stack((t, t), -1)[..., 0],
}


def tensor(array: np.ndarray) -> torch.Tensor:
    """A copy as a tensor."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(array.copy())


def value(t: torch.Tensor | None) -> Value:
    """A copy as a Value."""
    if t is None:
        return None
    t = t.detach()
    wide = t.float() if t.dtype == torch.bfloat16 else t
    return str(t.dtype).removeprefix("torch."), np.array(wide.numpy())


def losses_and_gradients_stored_elsewhere(device: torch.device, run: Run) -> list[tuple[float, list[np.ndarray]]]:
    """The first step's loss and this rank's gradients, as it is, and with what autograd keeps in the host's memory."""
    from contextlib import nullcontext

    from torch_impl import train
    from torch_impl.compose import loss_and_grads
    from torch_impl.mesh import make_mesh

    results, mesh = [], make_mesh(run, device)
    for store in (nullcontext, torch.autograd.graph.save_on_cpu):
        params, batch = train.make_params(mesh, run, device), train.make_batch(mesh, run, 0, device)
        with store():
            loss, grads = loss_and_grads(params, batch, mesh, run)
        results.append((loss.item(), [np.array(g.detach().numpy()) for layer in grads for g in layer]))
    return results
