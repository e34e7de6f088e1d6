"""Data parallel: the batch split by samples over `dp`, every rank with the whole model.

Backward: all_reduce of every gradient, L (D^2 + D) e bytes. Each rank's loss is its samples' share of the mean over all
samples, so the sum over ranks is the mean, and shares may differ in size.

`all_reduce_grads` is the lecture's one inserted line. `overlapped_all_reduce` does the same during the backward pass:
gradients are moved into flat buckets as they become ready, and each full bucket is sent while earlier layers are still
computing (Li et al., 2006.15704). The loss rides in the last one, as XLA has it too: a call of its own for four bytes
takes a fortieth of the default model's step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from contract.problem import Batch, Layer, split_slices
from contract.strategy import Run
from torch_impl.collectives import all_reduce, all_reduce_identity
from torch_impl.model import clear_grads, gelu, grads_of, squared_error

AXIS = "dp"
BUCKET_BYTES = 9 << 20  # two layers of the default model: fewer calls than one a layer, and still some to overlap


def split_params(params: list[Layer], mesh: DeviceMesh, run: Run) -> list[Layer]:
    """Every rank has the whole model: W[D, F], b[F]."""
    return params


def split_batch(batch: Batch, mesh: DeviceMesh, run: Run) -> Batch:
    """A rank's samples: X[B_dp, D], Y[B_dp, D]."""
    mine = split_slices(len(batch.x), mesh.size())[mesh.get_local_rank(AXIS)]
    return Batch(batch.x[mine], batch.y[mine], batch.weight[mine])


def loss(params: list[Layer], batch: Batch, mesh: DeviceMesh, run: Run) -> Tensor:
    """The mean squared error over the samples of all ranks, a scalar, the same on every rank."""
    return all_reduce_identity(share_of_loss(params, batch), mesh.get_group(AXIS))  # L = AllReduce_dp(L{U_dp})


def share_of_loss(params: list[Layer], batch: Batch) -> Tensor:
    """What a rank's samples add to the mean over all samples."""
    x = batch.x
    for w, b in params:
        x = gelu(x @ w + b)  # Y[B_dp, F] = X[B_dp, D] @ W[D, F]
    return squared_error(x, batch)


def loss_and_grads(params: list[Layer], batch: Batch, mesh: DeviceMesh, run: Run) -> tuple[Tensor, list[Layer]]:
    """The loss and the gradients, summed over all ranks."""
    group = mesh.get_group(AXIS)
    clear_grads(params)
    share = share_of_loss(params, batch)
    total = share.detach().clone()
    if run.overlap:
        with overlapped_all_reduce(total, params, group):
            share.backward()
    else:
        all_reduce(total, group)
        share.backward()
        all_reduce_grads(params, group)
    return total, grads_of(params)


def all_reduce_grads(params: list[Layer], group: ProcessGroup) -> None:
    """Sum every gradient over the ranks, one by one: dW[D, F] = AllReduce_dp(dW[D, F]{U_dp})."""
    for w, b in reversed(params):
        all_reduce(b.grad, group)
        all_reduce(w.grad, group)


@contextmanager
def overlapped_all_reduce(total: Tensor, params: list[Layer], group: ProcessGroup) -> Iterator[None]:
    """Sum `total`, a scalar, and the gradients of a backward pass run inside the `with`; done when it ends.

    Gradients become ready from the last layer to the first. Buckets are sent in the order in which that completes them,
    the same on every rank, as collectives must be. No rank waits for another before its backward pass is done.
    """
    buckets = make_buckets([*(p for layer in reversed(params) for p in reversed(layer)), total])
    flats = [bucket[0].new_empty(sum(t.numel() for t in bucket)) for bucket in buckets]
    parts = [flat.split([t.numel() for t in bucket]) for bucket, flat in zip(buckets, flats, strict=True)]
    parts[-1][-1].copy_(total)
    missing = [sum(t is not total for t in bucket) for bucket in buckets]
    sent: list[dist.Work] = []

    def ready(p: Tensor, index: int, part: Tensor) -> None:
        p.grad = part.view_as(p).copy_(p.grad)  # at once, while it is in the cache
        missing[index] -= 1
        while len(sent) < len(buckets) and missing[len(sent)] == 0:
            sent.append(dist.all_reduce(flats[len(sent)], group=group, async_op=True))

    hooks = [
        p.register_post_accumulate_grad_hook(lambda p, index=index, part=part: ready(p, index, part))
        for index, bucket in enumerate(buckets)
        for p, part in zip(bucket, parts[index], strict=True)
        if p is not total
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for _, work in zip(buckets, sent, strict=True):  # strict: all were sent
        work.wait()
    total.copy_(parts[-1][-1].view_as(total))


def make_buckets(tensors: list[Tensor], limit: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """Tensors in buckets of one dtype and about `limit` bytes, in the order in which the last of each comes.

    One that fills a bucket has it to itself; small ones before and after it still share theirs.
    """
    buckets: list[list[Tensor]] = []
    open_bucket, room = [], limit
    for t in tensors:
        size = t.numel() * t.element_size()
        if size >= limit:
            buckets.append([t])
            continue
        if open_bucket and (size > room or t.dtype != open_bucket[0].dtype):
            buckets.append(open_bucket)
            open_bucket, room = [], limit
        open_bucket.append(t)
        room -= size
    return [*buckets, open_bucket] if open_bucket else buckets
