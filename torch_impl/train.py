"""Train with explicit collectives: `run(Run) -> RunResult`, and the part of it that every rank runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from contract.layout import layout, merge, owned
from contract.optimizer import SLOTS, AdamW, Sgd
from contract.problem import Batch
from contract.share import HELD, names
from contract.strategy import Run, RunResult, Shard
from shardiff.ranks.rank import report_phase
from shardiff.ranks.supervisor import Workers
from shardiff.ranks.torch_pool import run_on_ranks
from torch_impl.compose import gather_updated, loss_and_grads, own, own_gradients, split_batch, split_params
from torch_impl.mesh import Mesh, make_mesh

BEFORE_FORK = ("torch._dynamo",)  # which torch.optim imports at first use, in more than a second
STATE_KEYS = {"momentum": "momentum_buffer", "m": "exp_avg", "v": "exp_avg_sq"}  # our slots -> torch.optim's


@dataclass
class RankResult:
    """One rank's share of a RunResult. Arrays that a lower rank holds too are None. digests[k][name]: after k steps."""

    losses: list[float]
    grads: list[Any]
    squared_norms: list[float]
    params: list[Any] = field(default_factory=list)
    optimizer_state: dict[str, list[Any]] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], str, int]] = field(default_factory=dict)
    digests: list[dict[str, str]] = field(default_factory=list)


def run(run: Run, workers: Workers | None = None) -> RunResult:
    """Train `run` and gather the full arrays. Raises WorkerError if a rank fails.

    workers: a pool to run in. Without one, the ranks are the processes that torchrun started, or else new ones for this
    run.
    """
    if workers is None:
        ranks = run_on_ranks(train, run, world_size=run.world_size, device=run.device)
    else:
        ranks = workers.call(train, run, world_size=run.world_size)
    return assemble(run, ranks)


def assemble(run: Run, ranks: list[RankResult]) -> RunResult:
    """Combine the results of all ranks. The loss is rank 0's; it is checked that all ranks have the same."""
    for rank, result in enumerate(ranks):
        if result.losses != ranks[0].losses:
            raise AssertionError(f"rank {rank} has losses {result.losses}, but rank 0 has {ranks[0].losses}")
    return RunResult(
        losses=np.array(ranks[0].losses),
        grads=merge(run, [r.grads for r in ranks], "gradients"),
        grad_norms=np.sqrt(np.sum([r.squared_norms for r in ranks], axis=0)),
        params=merge(run, [r.params for r in ranks]),
        optimizer_state={
            s: merge(run, [r.optimizer_state[s] for r in ranks], "optimizer_state") for s in SLOTS[run.optimizer]
        },
        shards=[
            {name: Shard(*shape, tuple(step[name] for step in r.digests)) for name, shape in r.shapes.items()}
            for r in ranks
        ],
    )


def train(device: torch.device, run: Run) -> RankResult:
    """What every rank runs, inside a process group of run.world_size ranks."""
    torch.set_float32_matmul_precision("highest")  # float32 means float32: no TF32
    mesh = make_mesh(run, device)
    rank = dist.get_rank()
    parts = layout(run)[rank]
    owns, of_grads, of_state = (owned(run, of)[rank] for of in HELD)

    params = make_params(mesh, run, device)
    optimizer, trained = make_own_optimizer(params, mesh, run)
    named = {
        name: p for part, layer in zip(parts, params, strict=True) for name, p in zip(names(part), layer, strict=True)
    }
    result = RankResult([], [], [], digests=[digests(named)])
    result.shapes = {n: (tuple(p.shape), dtype_name(p), p.numel() * p.element_size()) for n, p in named.items()}
    for step in range(run.steps):
        batch = make_batch(mesh, run, step, device)
        report_phase("forward")
        loss, grads = loss_and_grads(params, batch, mesh, run)
        result.losses.append(loss.item())
        result.squared_norms.append(squared_norm(grads, of_grads))
        if step == 0:
            result.grads = to_numpy(grads, of_grads)
        report_phase("update")
        update(optimizer, trained, own_gradients(grads, mesh, run))
        result.digests.append(digests(named))
    result.params = to_numpy(params, owns)
    for slot in SLOTS[run.optimizer]:
        state = [layer._make(optimizer.state[p][STATE_KEYS[slot]] for p in layer) for layer in trained]
        result.optimizer_state[slot] = to_numpy(state, of_state)
    return result


def make_params(mesh: Mesh, run: Run, device: torch.device) -> list[Any]:
    """A rank's shards of the initial parameters, as leaves of autograd."""
    full = [layer._make(tensor(a, run.problem.dtype) for a in layer) for layer in run.problem.parameters()]
    return make_leaves(split_params(full, mesh, run), device)


def make_leaves(shards: list[Any], device: torch.device) -> list[Any]:
    """Copy shards, which are often views of a full model, into memory of their own, as leaves of autograd."""

    def leaf(shard: Tensor) -> Tensor:
        return shard.to(device, copy=True, memory_format=torch.contiguous_format).requires_grad_()

    return [layer._make(map(leaf, layer)) for layer in shards]


def make_batch(mesh: Mesh, run: Run, step: int, device: torch.device) -> Batch:
    """A rank's shard of a step's batch. The weights, and hence the loss, are in float32 at least."""
    x, y, weight = run.problem.data(step)
    dtype = run.problem.dtype
    weight_dtype = "float64" if dtype == "float64" else "float32"
    full = Batch(tensor(x, dtype), tensor(y, dtype), tensor(weight, weight_dtype))
    return Batch(*(a.to(device).contiguous() for a in split_batch(full, mesh, run)))


def make_optimizer(params: list[Any], run: Run) -> torch.optim.Optimizer:
    """The optimizer of torch.optim, with the hyperparameters of `contract.optimizer`, over the shards of this rank."""
    kind, settings = optimizer_kind(run)
    return kind([p for layer in params for p in layer], **settings)


def optimizer_kind(run: Run) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class of a run's optimizer, and its arguments besides the parameters."""
    if run.optimizer == "sgd":
        sgd = Sgd()
        # Not fused: torch 2.13's fused SGD is wrong on CPU in bfloat16 (momentum off by two thirds after two steps).
        return torch.optim.SGD, {"lr": sgd.lr, "momentum": sgd.momentum, "foreach": True}
    adamw = AdamW()
    betas = (adamw.b1, adamw.b2)
    settings = {"lr": adamw.lr, "betas": betas, "eps": adamw.eps, "weight_decay": adamw.weight_decay, "fused": True}
    return torch.optim.AdamW, settings


def make_own_optimizer(params: list[Any], mesh: Mesh, run: Run) -> tuple[torch.optim.Optimizer, list[Any]]:
    """The optimizer of what this rank updates, and that: its parameters, or leaves that share a part of their memory.

    Where ranks update different parts, a step ends by gathering what all of them have updated.
    """
    trained = [
        layer._make(p if p.is_leaf else p.detach().requires_grad_() for p in layer) for layer in own(params, mesh, run)
    ]
    optimizer = make_optimizer(trained, run)
    optimizer.register_step_post_hook(lambda *_: gather_updated(params, mesh, run))
    return optimizer, trained


def update(optimizer: torch.optim.Optimizer, trained: list[Any], grads: list[Any]) -> None:
    """One optimizer step with these gradients."""
    for layer, layer_grads in zip(trained, grads, strict=True):
        for p, grad in zip(layer, layer_grads, strict=True):
            p.grad = grad
    optimizer.step()


def tensor(array: np.ndarray, dtype: str) -> Tensor:
    """A float64 array in `dtype`. It goes to bfloat16 by way of float32, as in NumPy."""
    if dtype == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(array.astype(dtype))


def dtype_name(t: Tensor) -> str:
    """float32, not torch.float32."""
    return str(t.dtype).removeprefix("torch.")


def to_numpy(layers: list[Any], owns: list[Any]) -> list[Any]:
    """NumPy copies of what no lower rank holds, None for the rest. bfloat16 is widened to float32."""

    def copy(t: Tensor, own: bool) -> np.ndarray | None:
        if not own:
            return None
        t = t.detach().cpu()
        return np.array((t.float() if t.dtype == torch.bfloat16 else t).numpy())

    return [layer._make(map(copy, layer, own)) for layer, own in zip(layers, owns, strict=True)]


def squared_norm(layers: list[Any], owns: list[Any]) -> float:
    """The sum of squares, in float64, over what no lower rank holds."""
    pairs = [(t, own) for layer, o in zip(layers, owns, strict=True) for t, own in zip(layer, o, strict=True)]
    return sum(t.detach().double().square().sum().item() for t, own in pairs if own)


def digests(named: dict[str, Tensor]) -> dict[str, str]:
    """A digest of every tensor's bits."""
    return {
        name: hashlib.blake2b(p.detach().cpu().contiguous().view(torch.uint8).numpy().data, digest_size=8).hexdigest()
        for name, p in named.items()
    }
