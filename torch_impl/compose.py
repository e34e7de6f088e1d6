"""One training step of several strategies, each on its own axis of the mesh. This module knows none of them by name.

It asks each strategy for the names in `contract.strategy`; a name that a strategy omits changes nothing. The innermost
strategy cuts first, and the outer ones cut its parts. Gradients are synchronized once per step, after the last
microbatch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contract.axes import Axes
from contract.problem import Batch
from contract.strategy import Run
from contract.transformer import Transformer
from torch_impl import model
from torch_impl.blocks import Blocks, again
from torch_impl.buckets import overlapped_all_reduce
from torch_impl.collectives import all_reduce, wait
from torch_impl.gather_again import gathered_again
from torch_impl.in_place import all_gather_in_place, copies_out
from torch_impl.mesh import Mesh
from torch_impl.model import clear_grads, squared_error, take_grads
from torch_impl.prefetch import Prefetch, Scatter, overlapped_reduce_scatter

Strategies = Sequence[Any]  # modules, outermost first


def load(run: Run, axes: Axes | None = None) -> Strategies:
    """The modules of a run's strategies, outermost first. axes: in another order."""
    return [importlib.import_module(f"torch_impl.explicit.{axis.strategy}") for axis in axes or run.nested]


def chain(strategies: Strategies, name: str, value: Any, mesh: Mesh) -> Any:
    """Pass `value` through the function `name` of every strategy that has it, in the order of `strategies`."""
    for strategy in strategies:
        if hasattr(strategy, name):
            value = getattr(strategy, name)(value, mesh)
    return value


def split_params(params: list[Any], mesh: Mesh, run: Run) -> list[Any]:
    """A rank's shards of the full parameters, as views."""
    return chain(load(run)[::-1], "split_params", params, mesh)


def split_batch(batch: Batch, mesh: Mesh, run: Run) -> Batch:
    """A rank's shards of the global batch."""
    return chain(load(run, run.cutting_the_batch), "split_batch", batch, mesh)


def own(layers: list[Any], mesh: Mesh, run: Run) -> list[Any]:
    """What this rank's optimizer updates of its parameters, as views."""
    return [chain(load(run)[::-1], "own", layer, mesh) for layer in layers]


def own_gradients(grads: list[Any], mesh: Mesh, run: Run) -> list[Any]:
    """The gradients of what this rank's optimizer updates, from those that the rank holds."""
    whole = [s for s in load(run)[::-1] if not hasattr(s, "gradients")]
    return [chain(whole, "own", layer, mesh) for layer in grads]


def gather_updated(params: list[Any], mesh: Mesh, run: Run) -> None:
    """After the update of what each rank owns: make the parameters whole again, in place."""
    for strategy in (strategy for strategy in load(run) if hasattr(strategy, "whole")):
        group = mesh.group(strategy.AXIS)
        if run.overlap and copies_out(group):
            wholes = [p.detach() for layer in params for p in layer]
            mine = [p.detach() for layer in params for p in strategy.own(layer, mesh)]
            all_gather_in_place(wholes, mine, group.group_name)
            continue
        for work in [work for layer in params for work in strategy.whole(layer, mesh)]:
            wait(work)


def loss(params: list[Any], batch: Batch, mesh: Mesh, run: Run) -> Tensor:
    """The mean squared error over the samples of all ranks: a scalar, the same on every rank."""
    strategies, sums = load(run), Sums(load(run), mesh)
    with torch.no_grad():
        passes(strategies, params, batch, mesh, run, sums.add, forward_only=True)
    return sums.result()


def loss_and_grads(params: list[Any], batch: Batch, mesh: Mesh, run: Run, **watched: Any) -> tuple[Tensor, list[Any]]:
    """The loss, and the gradients that a rank holds. watched: `observe`, `input_grad`, `kept` for a pipeline."""
    strategies = load(run)
    clear_grads(params)
    pipeline = any(hasattr(s, "execute") for s in strategies)
    freed = gathered_again() if run.gathered_again else nullcontext()
    replicated = [s for s in strategies if getattr(s, "REPLICATED", False)]
    groups = [mesh.group(s.AXIS) for s in replicated]
    gathers = [s for s in strategies if getattr(s, "GATHERS", False)]
    scatters = [s for s in strategies if hasattr(s, "gradients")]
    overlapped = scatters or (gathers and run.recompute != "block")  # a block that is run again gathers for itself
    if run.overlap and not pipeline and overlapped:
        sums, scatter = Sums(strategies, mesh), Scatter(params, mesh.group((gathers or scatters)[0].AXIS), groups)
        others = [s for s in strategies if s not in replicated]
        rest = [s for s in others if s not in gathers]
        gathered = Prefetch(params, scatter).layers() if gathers else None
        with freed, nullcontext() if gathers else overlapped_reduce_scatter(params, scatter):
            passes(strategies, params, batch, mesh, run, sums.add, before=rest, gathered=gathered)
        return sums.result(), scatter.finish()
    deferred = replicated[:1] if run.overlap and not scatters else []
    others = [s for s in strategies if s not in deferred]
    sums = Sums(others, mesh)
    beside: AbstractContextManager[None] = nullcontext()
    if deferred:
        sums.total = total = batch.weight.new_zeros(())
        times = run.microbatches if pipeline else 1
        beside = overlapped_all_reduce(total, sums.settle, params, times, mesh.group(deferred[0].AXIS))
    summed_later = replicated if scatters else []  # over replicas only the shards are summed
    before = [s for s in others if s not in summed_later]
    with beside, freed:
        passes(strategies, params, batch, mesh, run, sums.add, before=before, **watched)
    grads = [chain(others, "gradients", layer, mesh) for layer in take_grads(params)]
    for strategy in summed_later:
        for grad in (g for layer in reversed(grads) for g in reversed(layer)):
            all_reduce(grad, mesh.group(strategy.AXIS))
    return sums.result(), grads


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


def model_of(strategies: Strategies, run: Run) -> Callable[..., Tensor]:
    """The function of (layers, x, mesh) that computes the model, with what the strategies communicate inside it."""
    if isinstance(run.problem, Transformer):
        return Blocks(run.problem, tuple(strategies), run.recompute)
    return next((s.forward for s in strategies if hasattr(s, "forward")), model.forward)


def passes(
    strategies: Strategies,
    params: list[Any],
    batch: Batch,
    mesh: Mesh,
    run: Run,
    total: Callable[[Tensor], None],
    forward_only: bool = False,
    before: Strategies | None = None,
    gathered: Iterator[Any] | None = None,
    **watched: Any,
) -> None:
    """Forward and backward passes in the pipeline's order if there is a pipeline; otherwise one of each.

    before: whose `weights` make the layers as they are used, if not those of all strategies. gathered: the layers, if
    something else has put them together.
    """
    forward = model_of(strategies, run)
    pipeline = next((s for s in strategies if hasattr(s, "execute")), None)

    def used(layers: Iterable[Any]) -> Iterator[Any]:
        makers = strategies if before is None else before
        return (chain(makers, "weights", layer, mesh) for layer in layers)  # each layer at the moment it is used

    def through(layers: list[Any] | Iterator[Any], x: Tensor, made: Callable[..., Any] = used) -> Tensor:
        if run.recompute != "block" or not isinstance(layers, list):
            return forward(made(layers), x, mesh)
        block = again(lambda layers, x: forward(made(layers), x, mesh))
        for i in range(0, len(layers), mesh.unit):
            x = block(layers[i : i + mesh.unit], x)
        return x

    if pipeline is None:
        share = squared_error(through(params if gathered is None else gathered, batch.x), batch)
        total(share.detach())
        if not forward_only:
            share.backward()
        return

    # All microbatches accumulate gradients at the layers as used; these go back through `weights` once, at the end.
    whole = list(used(params))
    leaves = [layer._make(p if p.is_leaf else p.detach().requires_grad_() for p in layer) for layer in whole]
    assert mesh.schedule is not None
    chunks, rest = [], leaves
    for size in pipeline.chunk_sizes(run.problem.depth, mesh):
        # Where W is put off, each unit of layers is a function of its own, so that only what W needs is kept.
        step = mesh.unit if mesh.schedule.split else size
        chunks.append([partial(through, rest[i : i + step], made=iter) for i in range(0, size, step)])
        rest = rest[size:]
    pipeline.execute(chunks, squared_error, total, batch, mesh, forward_only, **watched)
    pairs = [(p, leaf.grad) for a, b in zip(whole, leaves, strict=True) for p, leaf in zip(a, b, strict=True)]
    made = [(p, grad) for p, grad in pairs if not p.is_leaf and grad is not None]
    if made and not forward_only:
        torch.autograd.backward([p for p, _ in made], [grad for _, grad in made])
