"""Gradients summed over replicas in flat buckets, sent while the backward pass still runs (Li et al., 2006.15704).

The result is that of `weights` of data_parallel, but sooner: small gradients are moved into flat buckets as they become
ready, large ones are sent from where they are, and each full bucket is sent while earlier layers are still computing.
The loss is sent in the last bucket, as XLA does too: a call of its own for four bytes takes a fortieth of the default
model's step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from contract.buckets import BUCKET_BYTES, bucketed
from torch_impl.collectives import wait


@contextmanager
def overlapped_all_reduce(
    total: Tensor, settled: Callable[[], None], params: list[Any], passes: int, group: ProcessGroup
) -> Iterator[None]:
    """Sum the gradients of the backward passes inside the `with`, and `total`, a scalar. Both are done when it ends.

    passes: the number of backward passes; the last one completes the gradients. settled: called before `total` is read.
    Gradients become ready from the last layer to the first. Buckets are sent in the order in which this completes them,
    which is the same on every rank, as collectives require. No rank waits for another before its backward pass is done.
    """
    buckets = make_buckets([*(p for layer in reversed(params) for p in reversed(layer)), total])
    flats = [None if len(b) == 1 else b[0].new_empty(sum(t.numel() for t in b)) for b in buckets]
    parts = [[None] if f is None else f.split([t.numel() for t in b]) for b, f in zip(buckets, flats, strict=True)]
    missing = [sum(t is not total for t in bucket) for bucket in buckets]
    seen: Counter[int] = Counter()
    sent: list[dist.Work | None] = []

    def send() -> None:
        flat, first = flats[len(sent)], buckets[len(sent)][0]
        if len(sent) == len(buckets) - 1:
            settled()
            if flat is not None:
                flat[-1] = total
        alone = total if first is total else first.grad
        sent.append(dist.all_reduce(alone if flat is None else flat, group=group, async_op=True))

    def ready(p: Tensor, index: int, part: Tensor | None) -> None:
        seen[id(p)] += 1
        if seen[id(p)] < passes:
            return
        complete(p, index, part)

    def complete(p: Tensor, index: int, part: Tensor | None) -> None:
        assert p.grad is not None
        if part is None:
            p.grad = p.grad.contiguous()
        else:
            p.grad = part.view_as(p).copy_(p.grad)  # copied at once, while it is in the cache
        missing[index] -= 1
        while len(sent) < len(buckets) and missing[len(sent)] == 0:
            send()

    places = [
        (p, index, part)
        for index, bucket in enumerate(buckets)
        for p, part in zip(bucket, parts[index], strict=True)
        if p is not total
    ]
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p, index=index, part=part: ready(p, index, part))
        for p, index, part in places
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for p, index, part in places:
        if passes > seen[id(p)]:  # in a pipeline, the gradients of what other strategies' `weights` make come at once
            complete(p, index, part)
    for _, work in zip(buckets, sent, strict=True):  # strict asserts that all were sent
        wait(work)
    if flats[-1] is not None:
        total.copy_(flats[-1][-1])


def make_buckets(tensors: list[Tensor], limit: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """Tensors in the buckets of `contract.buckets`, each of one dtype."""
    sizes = [t.numel() * t.element_size() for t in tensors]
    return [[tensors[i] for i in bucket] for bucket in bucketed(sizes, [t.dtype for t in tensors], limit)]
