"""One training step of several strategies, each on its own axis of the mesh. This module knows none of them by name.

It asks each strategy for the names in `contract.strategy`; a name that a strategy omits changes nothing. The innermost
strategy cuts first, and the outer ones cut its parts. Gradients are synchronized once per step, after the last
microbatch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contract.problem import Batch, Layer
from contract.strategy import Run
from torch_impl import model
from torch_impl.buckets import overlapped_all_reduce
from torch_impl.mesh import Mesh
from torch_impl.model import clear_grads, grads_of, squared_error

Strategies = Sequence[Any]  # modules, outermost first


def load(run: Run) -> Strategies:
    """The modules of a run's strategies."""
    return [importlib.import_module(f"torch_impl.explicit.{name}") for name in run.strategies]


def chain(strategies: Strategies, name: str, value: Any, mesh: Mesh) -> Any:
    """Pass `value` through the function `name` of every strategy that has it, the innermost first."""
    for strategy in reversed(strategies):
        if hasattr(strategy, name):
            value = getattr(strategy, name)(value, mesh)
    return value


def split_params(params: list[Layer], mesh: Mesh, run: Run) -> list[Layer]:
    """A rank's shards of the full parameters, as views."""
    return chain(load(run), "split_params", params, mesh)


def split_batch(batch: Batch, mesh: Mesh, run: Run) -> Batch:
    """A rank's shards of the global batch."""
    return chain(load(run), "split_batch", batch, mesh)


def loss(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Tensor:
    """The mean squared error over the samples of all ranks: a scalar, the same on every rank."""
    strategies, sums = load(run), Sums(load(run), mesh)
    with torch.no_grad():
        passes(strategies, params, batch, mesh, run, sums.add, forward_only=True)
    return sums.result()


def loss_and_grads(
    params: list[Layer], batch: Batch, mesh: Mesh, run: Run, **watched: Any
) -> tuple[Tensor, list[Layer]]:
    """The loss, and the gradients of a rank's shards. watched: `observe`, `input_grad`, `kept` for a pipeline."""
    strategies = load(run)
    clear_grads(params)
    deferred = [s for s in strategies if run.overlap and getattr(s, "REPLICATED", False)][:1]
    others = [s for s in strategies if s not in deferred]
    sums = Sums(others, mesh)
    beside: AbstractContextManager[None] = nullcontext()
    if deferred:
        sums.total = total = batch.weight.new_zeros(())
        times = run.microbatches if any(hasattr(s, "execute") for s in strategies) else 1
        beside = overlapped_all_reduce(total, sums.settle, params, times, mesh.group(deferred[0].AXIS))
    with beside:
        passes(others, params, batch, mesh, run, sums.add, **watched)
    return sums.result(), grads_of(params)


class Sums:
    """Sums the loss over all ranks: one scalar all_reduce per axis. Nothing has to wait for the last one.

    The last one is over a pipeline's stages, which are done with their forward passes at different times.
    """

    def __init__(self, strategies: Strategies, mesh: Mesh) -> None:
        summing = [s for s in reversed(strategies) if hasattr(s, "total")]
        self.strategies, self.mesh = sorted(summing, key=lambda s: hasattr(s, "execute")), mesh
        self.total: Tensor | None = None
        self.work: dist.Work | None = None

    def add(self, share: Tensor) -> None:
        """Start the sums of the ranks' shares."""
        self.total = share.clone() if self.total is None else self.total.copy_(share)
        for strategy in self.strategies:
            self.settle()
            self.work = strategy.total(self.total, self.mesh)

    def settle(self) -> None:
        """Wait for the sum that was started last."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def result(self) -> Tensor:
        """The loss, once all sums are done."""
        self.settle()
        assert self.total is not None
        return self.total


def passes(
    strategies: Strategies,
    params: list[Layer],
    batch: Batch,
    mesh: Mesh,
    run: Run,
    total: Callable[[Tensor], None],
    forward_only: bool = False,
    **watched: Any,
) -> None:
    """Forward and backward passes in the pipeline's order if there is a pipeline; otherwise one of each."""
    forward = next((s.forward for s in strategies if hasattr(s, "forward")), model.forward)
    pipeline = next((s for s in strategies if hasattr(s, "execute")), None)

    def used() -> Iterator[Layer]:
        return (chain(strategies, "weights", layer, mesh) for layer in params)  # each layer at the moment it is used

    if pipeline is None:
        share = squared_error(forward(used(), batch.x, mesh), batch)
        total(share.detach())
        if not forward_only:
            share.backward()
        return

    # All microbatches accumulate gradients at the layers as used; these go back through `weights` once, at the end.
    whole = list(used())
    leaves = [Layer(*(p if p.is_leaf else p.detach().requires_grad_() for p in layer)) for layer in whole]
    assert mesh.schedule is not None
    chunks, rest = [], leaves
    for size in pipeline.chunk_sizes(run.problem.layers, mesh):
        # Where W is put off, each unit of layers is a function of its own, so that only what W needs is kept.
        step = mesh.unit if mesh.schedule.split else size
        chunks.append([partial(forward, rest[i : i + step], mesh=mesh) for i in range(0, size, step)])
        rest = rest[size:]
    pipeline.execute(chunks, squared_error, total, batch, mesh, forward_only, **watched)
    pairs = [(p, leaf.grad) for a, b in zip(whole, leaves, strict=True) for p, leaf in zip(a, b, strict=True)]
    through = [(p, grad) for p, grad in pairs if not p.is_leaf and grad is not None]
    if through and not forward_only:
        torch.autograd.backward([p for p, _ in through], [grad for _, grad in through])
