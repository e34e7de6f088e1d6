"""Layers gathered ahead of their use, and gradients reduce_scattered behind it (Zhao et al., 2304.11277, section 3.3).

The result is that of `weights` of fully_sharded or `gradients` of zero2, but sooner: while a layer computes, the next
one is gathered, and the gradients of the one before are summed. What is sent, and in which order, is the same on every
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardiff.ranks.torch_versions import all_gather_single, reduce_scatter_single
from torch_impl.collectives import wait


class Pending(NamedTuple):
    """A collective that runs. flat: its result, once `work` is done. shards: what each part of `flat` is shaped as."""

    work: dist.Work | None
    flat: Tensor
    shards: Sequence[Tensor]


class Scatter:
    """The gradients of one step, of whole layers as they become ready. They are summed and split after `finish`.

    params: a rank's own. group: over which they are split. replicas: over which the shards are replicated; gradients
    are summed over these after they have been scattered.
    """

    def __init__(self, params: list[Any], group: ProcessGroup, replicas: Sequence[ProcessGroup]) -> None:
        self.params, self.group, self.replicas = params, group, replicas
        self.scattering: tuple[int, Pending] | None = None
        self.summing: dict[int, Pending] = {}  # layer -> its shards, of which the replicas' sum may run

    def give(self, i: int, grads: Sequence[Tensor]) -> None:
        """Start to sum and split the gradients of layer `i`."""
        self.scattered()
        n = self.group.size()
        shards = [grad.chunk(n)[0] for grad in grads]
        whole = torch.cat([grad.reshape(n, -1) for grad in grads], dim=1)
        flat = whole.new_empty(whole.shape[1])
        work = reduce_scatter_single(flat, whole.flatten(), group=self.group, async_op=True)
        self.scattering = i, Pending(work, flat, shards)

    def scattered(self) -> None:
        """The sum that was started last is done; what follows is its sum over the replicas."""
        if self.scattering is not None:
            (i, done), self.scattering = self.scattering, None
            wait(done.work)
            works = [dist.all_reduce(done.flat, group=group, async_op=True) for group in self.replicas[:1]]
            self.summing[i] = done._replace(work=works[0] if works else None)

    def finish(self) -> list[Any]:
        """Wait for all sums: the gradients of a rank's shards, layer by layer."""
        self.scattered()
        for one in self.summing.values():
            if self.replicas:
                wait(one.work)
            for group in self.replicas[1:]:
                dist.all_reduce(one.flat, group=group)
        return [self.params[i]._make(parts_of(one)) for i, one in sorted(self.summing.items())]


def parts_of(one: Pending) -> Iterator[Tensor]:
    """The tensors that lie in `flat` one after the other."""
    for shard, part in zip(one.shards, one.flat.split([s.numel() for s in one.shards]), strict=True):
        yield part.view(shard.shape)


@contextmanager
def overlapped_reduce_scatter(params: list[Any], scatter: Scatter) -> Iterator[None]:
    """Inside the `with`, give every layer's gradients to `scatter` as soon as one backward pass has left them."""

    def ready(i: int, layer: Any) -> None:
        grads = [p.grad for p in layer]
        if None not in grads:
            for p in layer:
                p.grad = None  # the whole is freed once it has been sent
            scatter.give(i, grads)

    hooks = [
        p.register_post_accumulate_grad_hook(lambda p, i=i, layer=layer: ready(i, layer))
        for i, layer in enumerate(params)
        for p in layer
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Prefetch:
    """The layers of one step as they are used. params: a rank's shards. scatter: takes the gradients of the layers."""

    def __init__(self, params: list[Any], scatter: Scatter) -> None:
        self.params, self.group, self.scatter = params, scatter.group, scatter
        self.gathering: dict[tuple[int, bool], Pending] = {}  # (layer, whether for the backward pass)
        self.needed: list[set[int]] = [set() for _ in params]  # of each layer's parameters, in the backward pass
        self.again: dict[int, dict[int, Tensor]] = {}  # layer -> number of a parameter -> gathered again

    def layers(self) -> Iterator[Any]:
        """Every layer at the moment it is used, with the next one on its way."""
        for i, layer in enumerate(self.params):
            yield layer._make(_Used.apply(self, i, *layer))

    def take(self, i: int) -> tuple[Tensor, ...]:
        """The gathered parameters of layer `i`; starts to gather those of the next layer."""
        self.start(i, self.params[i])
        if i + 1 < len(self.params):
            self.start(i + 1, self.params[i + 1])
        return self.finish(i)

    def take_again(self, i: int, number: int) -> Tensor:
        """Parameter `number` of layer `i`, gathered again with all that the backward pass needs of the layer."""
        if i not in self.again:
            for layer in (i, i - 1):
                if layer >= 0 and self.needed[layer]:
                    self.start(layer, [self.params[layer][n] for n in sorted(self.needed[layer])], again=True)
            self.again[i] = dict(zip(sorted(self.needed[i]), self.finish(i, again=True), strict=True))
        return self.again[i][number]

    def start(self, i: int, shards: Sequence[Tensor], again: bool = False) -> None:
        """Start to gather these shards of layer `i`, unless that is on its way."""
        if (i, again) not in self.gathering:
            shards = [shard.detach() for shard in shards]
            mine = torch.cat([shard.flatten() for shard in shards]) if len(shards) > 1 else shards[0].flatten()
            flat = mine.new_empty(self.group.size(), mine.numel())
            work = all_gather_single(flat.flatten(), mine, group=self.group, async_op=True)
            self.gathering[i, again] = Pending(work, flat, shards)

    def finish(self, i: int, again: bool = False) -> tuple[Tensor, ...]:
        """Wait for what was started for layer `i`."""
        now = self.gathering.pop((i, again))
        wait(now.work)
        return tuple(
            part.reshape(-1, *shard.shape[1:])
            for part, shard in zip(now.flat.split([s.numel() for s in now.shards], dim=1), now.shards, strict=True)
        )


class _Used(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prefetch: Prefetch, i: int, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.prefetch, ctx.i = prefetch, i
        ctx.note, ctx.again = prefetch.needed[i].add, lambda number: prefetch.take_again(i, number)
        return prefetch.take(i)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.prefetch.again.pop(ctx.i, None)
        ctx.prefetch.scatter.give(ctx.i, grads)
        return (None,) * (2 + len(grads))
