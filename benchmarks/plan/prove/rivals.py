"""Steps on a slow link of what sums and splits gradients, on a rank of a lab: gloo's reduce_scatter, the same by
messages and a local sum, all_reduce, and torch's own DDP and FSDP2."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.lab.lab import Lab
from benchmarks.lab.traffic import sent_bytes
from benchmarks.plan.prove.steps import CPU, Paced, groups_of
from benchmarks.steps import peers, peers_sharded
from contract.axes import one_axis
from contract.layout import schedule_of, unit_of
from contract.problem import Problem
from contract.strategy import Run
from torch_impl import prefetch, train
from torch_impl.compose import loss_and_grads
from torch_impl.mesh import Mesh
from torch_impl.paced import PacedDevice

MESSAGES = "fully_sharded, reduce_scatter by messages"
RIVALS: dict[str, tuple[str, peers.Maker | None]] = {
    "fully_sharded": ("fully_sharded", None),
    MESSAGES: ("fully_sharded", None),
    "FSDP2": ("fully_sharded", peers_sharded.fsdp2),
    "data_parallel": ("data_parallel", None),
    "DDP": ("data_parallel", peers.distributed_data_parallel),
}


@dataclass
class Summing:
    """A reduce_scatter of messages that are on their way; `wait` ends with the sum of the blocks in `out`."""

    works: list[dist.Work | None]
    arrived: Tensor
    out: Tensor

    def wait(self) -> None:
        for work in self.works:
            assert work is not None
            work.wait()
        torch.sum(self.arrived, 0, out=self.out)


def reduce_scatter_by_messages(out: Tensor, x: Tensor, group: ProcessGroup, async_op: bool) -> Summing:
    """Every rank sends the others their blocks of x[n * out.numel()], and sums those that arrive. It sends S (n-1)/n,
    the optimal bytes. Receives are posted first, for gloo to use both directions of a link."""
    assert async_op
    n, rank, blocks = group.size(), group.rank(), x.view(group.size(), -1)
    arrived = torch.empty_like(blocks)
    others = [(rank + i) % n for i in range(1, n)]
    works = [dist.irecv(arrived[peer], group=group, group_src=peer) for peer in others]
    works += [dist.isend(blocks[peer], group=group, group_dst=peer) for peer in others]
    arrived[rank] = blocks[rank]
    return Summing(works, arrived, out)


@contextmanager
def by_messages() -> Iterator[None]:
    """Inside, `torch_impl.prefetch` sums and splits gradients by messages."""
    with patch.object(prefetch, "reduce_scatter_single", reduce_scatter_by_messages):
        yield


def contestant(name: str, problem: Problem) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """A step of it, and its parameters."""
    strategy, peer = RIVALS[name]
    run = Run("torch", one_axis(strategy, dist.get_world_size()), problem, steps=1, device="cpu")
    mesh = Mesh(groups_of(run.mesh.axes, "gloo"), unit_of(run), schedule_of(run))
    batch = train.make_batch(mesh, run, 0, CPU)
    if peer is not None:
        ranks = DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=run.mesh.names)
        one_step, model = peer(ranks, run, CPU)
        optimizer = peers.optimizer_of(model, ranks, run)

        def theirs() -> Tensor:
            optimizer.zero_grad()
            loss = one_step(batch)
            optimizer.step()
            return loss

        return theirs, list(model.parameters())
    params = train.make_params(mesh, run, CPU)
    mine = train.make_optimizer(params, run)

    def ours() -> Tensor:
        loss, grads = loss_and_grads(params, batch, mesh, run)
        train.update(mine, params, grads)
        return loss

    def sent_in_parts() -> Tensor:
        with by_messages():
            return ours()

    return (sent_in_parts if name == MESSAGES else ours), [p for layer in params for p in layer]


def contest(problem: Problem, paced: Paced, iterations: int) -> dict[str, dict[str, Any]]:
    """Name -> seconds of each step, taken in turns; bytes that this rank sent in the last; and the loss after all."""
    made = {name: contestant(name, problem)[0] for name in RIVALS}
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "sent": 0, "loss": step().item()} for name, step in made.items()
    }
    for _ in range(iterations):
        for name, step in made.items():
            dist.barrier()
            before, began = sent_bytes(), time.perf_counter()
            with PacedDevice(paced.flops, paced.memory) as device:
                loss = step()
            device.synchronize()
            found[name]["seconds"].append(time.perf_counter() - began)
            dist.barrier()
            found[name] |= {"sent": sent_bytes() - before, "loss": loss.item()}
    return found


def measure(lab: Lab, rate: float, problem: Problem, paced: Paced, iterations: int) -> list[dict[str, Any]]:
    """One entry for each contestant. Raises ValueError if they do not train alike."""
    lab.rates(rate, rate)
    answers = lab.call(__name__, "contest", problem, paced, iterations)
    losses = {name: answers[0][name]["loss"] for name in RIVALS}
    if max(losses.values()) > min(losses.values()) * (1 + 1e-4):
        raise ValueError(f"losses differ after {iterations + 1} steps: {losses}")
    return [
        {
            "name": name,
            "ranks": lab.shape.ranks,
            "rate_bits_per_second": rate,
            "batch": problem.batch,
            "width": problem.width,
            "layers": problem.layers,
            "seconds": median(max(each[name]["seconds"][i] for each in answers) for i in range(iterations)),
            "sent_bytes": max(each[name]["sent"] for each in answers),
        }
        for name in RIVALS
    ]


def table(entries: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown."""
    lines = ["| on 2 ranks | link | batch x width | bytes sent | step |", "|---|---|---|---|---|"]
    for one in entries:
        lines.append(
            f"| {one['name']} | {one['rate_bits_per_second'] / 1e6:g} Mbit/s | {one['batch']} x {one['width']} | "
            f"{one['sent_bytes'] / 1e6:.2f} MB | {one['seconds']:.2f} s |"
        )
    return lines
