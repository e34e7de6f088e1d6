"""Layers gathered ahead of their use, and gradients reduce_scattered behind it (Zhao et al., 2304.11277, section 3.3).

The result is that of `weights` of fully_sharded, but sooner: while a layer computes, the next one is gathered, and the
gradients of the one before are summed. What is sent, and in which order, is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from contract.problem import Layer
from shardiff.ranks.torch_versions import all_gather_single, reduce_scatter_single
from torch_impl.collectives import wait


class Pending(NamedTuple):
    """A collective that runs. flat: its result, once `work` is done. shards: what each part of `flat` belongs to."""

    work: dist.Work | None
    flat: Tensor
    shards: Sequence[Tensor]


class Prefetch:
    """The layers of one step as they are used. A layer's gradients are whole sums after `finish`.

    params: a rank's shards. group: over which they are split. replicas: over which the shards are replicated; gradients
    are summed over these after they have been scattered.
    """

    def __init__(self, params: list[Layer], group: ProcessGroup, replicas: Sequence[ProcessGroup]) -> None:
        self.params, self.group, self.replicas = params, group, replicas
        self.gathering: dict[tuple[int, bool], Pending] = {}  # (layer, whether for the backward pass)
        self.scattering: Pending | None = None
        self.summing: list[Pending] = []

    def layers(self) -> Iterator[Layer]:
        """Every layer at the moment it is used, with the next one on its way."""
        for i, layer in enumerate(self.params):
            yield Layer(*_Used.apply(self, i, *layer))

    def take(self, i: int, shards: Sequence[Tensor], again: bool) -> tuple[Tensor, ...]:
        """The gathered parameters of layer `i`; starts to gather those of the layer that is used next."""
        following = i - 1 if again else i + 1
        self.start(i, shards, again)
        now = self.gathering.pop((i, again))
        if again and following > 0:  # the first layer's input needs no gradient
            self.start(following, self.params[following][:1], again)
        if not again and following < len(self.params):
            self.start(following, self.params[following], again)
        wait(now.work)
        return tuple(
            part.reshape(-1, *shard.shape[1:])
            for part, shard in zip(now.flat.split([s.numel() for s in now.shards], dim=1), now.shards, strict=True)
        )

    def start(self, i: int, shards: Sequence[Tensor], again: bool) -> None:
        """Start to gather these shards of layer `i`, unless that is on its way."""
        if (i, again) not in self.gathering:
            shards = [shard.detach() for shard in shards]
            mine = torch.cat([shard.flatten() for shard in shards]) if len(shards) > 1 else shards[0].flatten()
            flat = mine.new_empty(self.group.size(), mine.numel())
            work = all_gather_single(flat.flatten(), mine, group=self.group, async_op=True)
            self.gathering[i, again] = Pending(work, flat, shards)

    def give(self, i: int, grads: Sequence[Tensor]) -> None:
        """Start to sum and split the gradients of layer `i`."""
        self.scattered()
        n = self.group.size()
        whole = torch.cat([grad.reshape(n, -1) for grad in grads], dim=1)
        flat = whole.new_empty(whole.shape[1])
        work = reduce_scatter_single(flat, whole.flatten(), group=self.group, async_op=True)
        self.scattering = Pending(work, flat, self.params[i])

    def scattered(self) -> None:
        """The sum that was started last is done; what follows is its sum over the replicas."""
        if self.scattering is not None:
            done, self.scattering = self.scattering, None
            wait(done.work)
            works = [dist.all_reduce(done.flat, group=group, async_op=True) for group in self.replicas[:1]]
            self.summing.append(done._replace(work=works[0] if works else None))

    def finish(self) -> None:
        """Wait for all sums, and hand the gradients over to the parameters."""
        self.scattered()
        for one in self.summing:
            if self.replicas:
                wait(one.work)
            for shard, grad in zip(one.shards, one.flat.split([s.numel() for s in one.shards]), strict=True):
                shard.grad = grad.view_as(shard)


class _Used(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prefetch: Prefetch, i: int, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.prefetch, ctx.i = prefetch, i
        ctx.again = lambda number: prefetch.take(i, shards[number : number + 1], again=True)[0]
        return prefetch.take(i, shards, again=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.prefetch.give(ctx.i, grads)
        return (None,) * (2 + len(grads))
