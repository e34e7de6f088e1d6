"""What the torch ranks of `shardiff bench experts` do: forward and backward pass with more and less popular experts.

The parameters are not updated, so that every pass routes the same tokens to the same experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.experts.skewed import DROPPING, OURS, SPARSE, Skewed, skewed
from benchmarks.steps import peers_blocks
from benchmarks.steps.torch import distance, synchronize
from contract.axes import one_axis
from contract.strategy import Run
from contract.transformer import Experts, Transformer
from torch_impl import train
from torch_impl.blocks import LAYERS, Blocks, norm
from torch_impl.compose import loss_and_grads
from torch_impl.mesh import Mesh, make_device_mesh, of_device_mesh

Pass = Callable[[], Any]


def measured(
    device: torch.device, problem: Transformer, skews: list[float], ranks: int, iterations: int
) -> list[dict[str, Any]]:
    """For each skew: loads, capacity, dropped; seconds of each contestant's passes, which take turns with all others;
    and how far the gradients of the two that must be equal are apart."""
    torch.set_float32_matmul_precision("highest")
    found, passes = [], {}
    for skew in skews:
        everyone = skewed(problem, skew, problem.sequence)  # a token chooses an expert once
        counts = chosen(everyone, device)
        told, mine = loads(counts, problem, ranks), {}
        run = run_of(skewed(problem, skew, told["capacity"]), ranks)
        usual = run_of(skewed(problem, skew, problem.capacity), ranks)
        ours, our_grads = explicit(run, device)
        sparse, their_grads = peer(run, device)
        mine = {OURS: ours, DROPPING: explicit(usual, device)[0], SPARSE: sparse}
        for act in (ours, sparse):
            act()
        told["difference"] = distance(their_grads(), our_grads())
        passes |= {(skew, name): one for name, one in mine.items()}
        found.append(told)
    seconds: dict[Any, list[float]] = {key: [] for key in passes}
    for iteration in range(iterations + 2):
        for key in reversed(passes) if iteration % 2 else passes:
            dist.barrier()
            start = time.perf_counter()
            passes[key]()
            synchronize(device)
            if iteration >= 2:
                seconds[key].append(time.perf_counter() - start)
    for skew, told in zip(skews, found, strict=True):
        told["seconds"] = {name: taken for (of, name), taken in seconds.items() if of == skew}
    return found


def run_of(problem: Skewed, ranks: int) -> Run:
    """Expert parallel over all ranks."""
    return Run("torch", one_axis("expert_parallel", ranks), problem, microbatches=1)


def explicit(run: Run, device: torch.device) -> tuple[Pass, Callable[[], list[Tensor]]]:
    """Our passes, and what they leave as gradients."""
    mesh = of_device_mesh(make_device_mesh(run, device), run)
    params, batch = train.make_params(mesh, run, device), train.make_batch(mesh, run, 0, device)
    grads: list[Any] = []

    def act() -> None:
        grads[:] = loss_and_grads(params, batch, mesh, run)[1]

    return act, lambda: [grad for layer in grads for grad in layer]


def peer(run: Run, device: torch.device) -> tuple[Pass, Callable[[], list[Tensor]]]:
    """Those of the library equivalent. Its matrices are those of nn.Linear, [out, in]."""
    mesh = make_device_mesh(run, device)
    step, model = peers_blocks.all_to_all(mesh, run, device)
    batch = train.make_batch(of_device_mesh(mesh, run), run, 0, device)

    def act() -> None:
        model.zero_grad(set_to_none=True)
        step(batch)

    def gradients() -> list[Tensor]:
        found = [p.grad for p in model.parameters() if p.grad is not None]
        return [grad.T if grad.ndim == 2 else grad for grad in found]

    return act, gradients


def chosen(problem: Skewed, device: torch.device) -> Tensor:
    """How many tokens of each sequence choose each expert, [block, B, E], on one device."""
    run, mesh = Run("torch", (), problem, microbatches=1), Mesh({})
    params, batch = train.make_params(mesh, run, device), train.make_batch(mesh, run, 0, device)
    model, x, counts = Blocks(problem, ()), batch.x, []
    with torch.no_grad():
        for layer in params:
            h = norm(x, layer.gain)
            if isinstance(layer, Experts):
                best = (h @ layer.router).topk(problem.top_k, dim=-1).indices.flatten(1)
                counts.append(torch.nn.functional.one_hot(best, problem.experts).sum(1))
            x = x + LAYERS[type(layer)](model, layer, h, mesh)
    return torch.stack(counts)


def loads(counts: Tensor, problem: Transformer, ranks: int) -> dict[str, Any]:
    """busiest_expert and busiest_rank, over the mean of all, in the block where that is most; capacity, with which none
    is dropped; dropped, the share of choices that the problem's own capacity drops."""
    by_expert = counts.sum(1).double()  # [block, E]
    by_rank = by_expert.unflatten(1, (ranks, -1)).sum(2)
    return {
        "busiest_expert": (by_expert.amax(1) / by_expert.mean(1)).max().item(),
        "busiest_rank": (by_rank.amax(1) / by_rank.mean(1)).max().item(),
        "capacity": int(counts.max()),
        "dropped": ((counts - problem.capacity).clamp(min=0).sum() / counts.sum()).item(),
    }
