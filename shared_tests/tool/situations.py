"""What goes wrong in people's training, in a few lines that a rank can run: from public reports of bugs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardiff.tracing.tracer import capture


def over(name: str) -> Any:
    """This rank's group over one axis of 2 x 2 ranks, which its maker has described."""
    mine = None
    for ranks in {"tp": ([0, 1], [2, 3]), "cp": ([0, 2], [1, 3])}[name]:
        group = dist.new_group(ranks, group_desc=name)
        mine = group if dist.get_rank() in ranks else mine
    return mine


def count_tokens(axis: str) -> None:
    """A count of tokens that must be summed over cp; over tp all have the same."""
    dist.all_reduce(torch.ones(1), group=over(axis))


def reduce_and_send(reduction: str, root: int) -> None:
    ops: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "avg": dist.ReduceOp.AVG}
    dist.all_reduce(torch.ones(4), ops[reduction])
    dist.broadcast(torch.ones(4), root)


class Copy(torch.autograd.Function):
    """Identity forward, all_reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    """all_reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def two_products(copies: int) -> None:
    """Split on columns, then on rows. One copy of the input is right; with two its gradient is reduced twice."""
    up, down = (nn.Parameter(torch.ones(8, 4, dtype=torch.float64)) for _ in range(2))
    h = x = torch.ones(4, 8, dtype=torch.float64, requires_grad=True) * 2
    for _ in range(copies):
        x = Copy.apply(x)
    Sum.apply(torch.relu(x @ up) @ down.T).square().sum().backward()
    assert h.shape == (4, 8)


def three_calls_of_one_line() -> None:
    (nn.Parameter(torch.zeros(())) * 2).backward()
    for _ in range(3):
        dist.all_reduce(torch.zeros(64))


def two_models() -> None:
    """Their parameters have the same names."""
    actor, critic = (nn.Sequential(nn.Linear(4, k), nn.ReLU()) for k in (4, 8))
    for net in (actor, critic):
        net(torch.ones(2, 4)).sum().backward()
    for net in (actor, critic):
        for p in net.parameters():
            dist.all_reduce(p.grad)


def power_sgd() -> None:
    """DDP whose hook calls from the callbacks of futures, in threads of C++."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    state: Any = hooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, hooks.powerSGD_hook)
    for _ in range(4):
        model(torch.ones(8, 64)).sum().backward()


OF_FOUR: dict[str, Callable[[], None]] = {
    "tokens over cp": partial(count_tokens, "cp"),
    "tokens over tp": partial(count_tokens, "tp"),
    "three calls": three_calls_of_one_line,
}
OF_TWO: dict[str, Callable[[], None]] = {
    "sum, root 0": partial(reduce_and_send, "sum", 0),
    "max, root 1": partial(reduce_and_send, "max", 1),
    "avg, root 0": partial(reduce_and_send, "avg", 0),
    "one copy": partial(two_products, 1),
    "two copies": partial(two_products, 2),
    "two models": two_models,
    "powersgd": power_sgd,
}


def traced(device: Any) -> dict[str, list[Any]]:
    """On a rank: the calls of each."""
    found = {}
    for name, run in (OF_FOUR if dist.get_world_size() == 4 else OF_TWO).items():
        with capture(first_phase="other") as calls:
            run()
        found[name] = calls
    return found
