"""What the torch ranks of `shardiff bench steps` do: all contestants of a strategy take turns step by step.

Compute is timed as the same step on a process group that sends nothing: torch's "fake" backend, whose collectives
return at once and leave buffers of the same shapes. What the real step takes longer is its exposed communication:
transfer that no computation hides, and waiting for other ranks, which in a pipeline is the bubble.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.memory_torch import held, kept_for_backward
from benchmarks.silent import SILENT
from benchmarks.steps import contestants
from benchmarks.steps.numbers import WARM_UP
from benchmarks.steps.torch_ring import NotThere
from contract.problem import Batch
from contract.strategy import Run
from torch_impl import train
from torch_impl.compose import loss_and_grads
from torch_impl.mesh import Mesh, make_device_mesh, of_device_mesh


@dataclass
class State:
    """A rank's contestants: name -> the step with what it holds, and the same on a silent group where there is one."""

    device: torch.device
    batch: Batch = field(init=False)
    real: dict[str, contestants.Contestant] = field(default_factory=dict)
    silent: dict[str, contestants.Contestant] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)


def prepare(state: State, run: Run, names: list[str]) -> dict[str, str]:
    """Build the contestants `names` of one strategy, "torch" or peers'. Returns why some cannot take part."""
    torch.set_float32_matmul_precision("highest")
    state.real.clear()
    state.silent.clear()
    mesh, quiet = make_device_mesh(run, state.device), silent_device_mesh(run, state.device)
    state.batch = train.make_batch(of_device_mesh(mesh, run), run, 0, state.device)
    left_out = {}
    for name in names:
        try:
            state.real[name] = contestants.make(name, mesh, run, state.device)
        except NotThere as error:
            left_out[name] = str(error)
            continue
        # Stages of torch.distributed.pipelining tell each other their shapes first, and ranks how many tokens come to
        # their experts, which a silent group cannot do.
        if run.world_size > 1 and name not in ("pipelining", "all_to_all"):
            state.silent[name] = contestants.make(name, quiet, run, state.device)
    return left_out


def prove(state: State) -> dict[str, float]:
    """One step of each contestant before any is timed: the distance of its gradients to those of the first."""
    for contestant in state.real.values():
        contestant.step(state.batch)
    first, *_ = state.real.values()
    return {name: distance(one.gradients(), first.gradients()) for name, one in state.real.items()}


def silent_device_mesh(run: Run, device: torch.device) -> DeviceMesh:
    """The axes of a run over groups that send nothing."""
    groups = []
    for axis in run.mesh.names or ("one",):
        ranks = run.mesh.groups(axis) if run.axes else ((0,),)
        group, _ = dist.new_subgroups_by_enumeration([list(each) for each in ranks], backend=SILENT)
        groups.append(group)
    shape, names = run.mesh.shape or (1,), run.mesh.names or ("one",)
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device.type, mesh_dim_names=names)
    ranks = torch.arange(run.world_size).view(shape)
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=names)


def block(state: State, iterations: int, warmup: int) -> dict[str, dict[str, list[float]]]:
    """name -> {"step", "compute"} -> seconds of each iteration. Real steps run one after the other, then silent ones;
    every other iteration in the opposite order."""
    taken: dict[str, dict[str, list[float]]] = {name: {"step": [], "compute": []} for name in state.real}
    order = [("step", name, c) for name, c in state.real.items()]
    order += [("compute", name, c) for name, c in state.silent.items()]
    for iteration in range(warmup + iterations):
        for kind, name, contestant in reversed(order) if iteration % 2 else order:
            dist.barrier()
            start = time.perf_counter()
            loss = contestant.step(state.batch)
            synchronize(state.device)
            if iteration >= warmup:
                taken[name][kind].append(time.perf_counter() - start)
            if kind == "step":
                state.loss[name] = loss.item()
    return taken


def finish(state: State) -> dict[str, dict[str, Any]]:
    """For each contestant: the last loss; the distance ||p - p_first|| / ||p_first|| of its parameters to those of the
    first contestant; bytes held, and kept for the backward pass (activations)."""
    results: dict[str, dict[str, Any]] = {}
    final = {name: contestant.final() for name, contestant in state.real.items()}
    first = next(iter(final.values()))
    for name, contestant in state.real.items():
        results[name] = {"loss": state.loss[name], "difference": distance(final[name], first)}
    for name, contestant in state.real.items():

        def step(contestant: contestants.Contestant = contestant) -> Tensor:
            return contestant.step(state.batch)

        results[name] |= held(contestant.leaves, contestant.optimizer)
        results[name]["activations"] = kept_for_backward(step, [*contestant.leaves, *state.batch])
    return results


def distance(these: list[Tensor], those: list[Tensor]) -> float:
    """||a - b|| / ||b|| over all tensors, in float64."""
    pairs = [(a.double(), b.double()) for a, b in zip(these, those, strict=True)]
    return (
        sum((a - b).square().sum().item() for a, b in pairs) / sum(b.square().sum().item() for _, b in pairs)
    ) ** 0.5


def speed(state: State, run: Run, iterations: int) -> dict[str, list[float]]:
    """Seconds of each iteration, taken in turn on one device: the three matrix products of each W[D, F] of a layer, or
    of a block, alone, X @ W, X^T @ dY and dY @ W^T; forward and backward pass of single_device; the optimizer's update;
    a copy of a tensor as large as the parameters."""
    mesh = Mesh({})
    params = train.make_params(mesh, run, state.device)
    optimizer = train.make_optimizer(params, run)
    batch = train.make_batch(mesh, run, 0, state.device)
    rows = batch.x[..., 0].numel()
    matrices = [p.detach() for layer in params[: run.problem.unit] for p in layer if p.ndim == 2]
    operands = [(w, *(w.new_empty(rows, size).normal_() for size in w.shape), torch.empty_like(w)) for w in matrices]
    source = torch.cat([p.detach().flatten() for layer in params for p in layer])
    target = torch.empty_like(source)
    grads: list[Any] = []

    def products() -> None:
        for w, x, y, out_w in operands:
            torch.mm(x, w, out=y)
            torch.mm(x.T, y, out=out_w)
            torch.mm(y, w.T, out=x)

    def passes() -> None:
        grads[:] = loss_and_grads(params, batch, mesh, run)[1]

    return in_turn(
        {
            "matmul": products,
            "forward_backward": passes,
            "update": lambda: train.update(optimizer, params, grads),
            "copy": lambda: target.copy_(source),
        },
        iterations,
        lambda: synchronize(state.device),
        min(WARM_UP, iterations),
    )


def in_turn(
    acts: dict[str, Callable[[], Any]], iterations: int, synchronize: Callable[[], None], warmup: int
) -> dict[str, list[float]]:
    """Seconds of each act in each iteration."""
    taken: dict[str, list[float]] = {name: [] for name in acts}
    for iteration in range(warmup + iterations):
        for name, act in acts.items():
            start = time.perf_counter()
            act()
            synchronize()
            if iteration >= warmup:
                taken[name].append(time.perf_counter() - start)
    return taken


def synchronize(device: torch.device) -> None:
    """Wait for the GPU; a CPU has finished when its functions return."""
    if device.type == "cuda":
        torch.cuda.synchronize()
