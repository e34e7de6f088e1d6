"""Data parallel: the batch split by samples over `dp`, every rank with the whole model.

Backward: all_reduce of every gradient, L (D^2 + D) e bytes. Each rank's loss is its samples' share of the mean over all
samples, so the sum over ranks is the mean, and shares may differ in size.

`all_reduce_grads` is the lecture's one inserted line. `overlapped_all_reduce` does the same during the backward pass:
gradients are put into flat buckets as they become ready, and each full bucket is sent while earlier layers are still
computing (Li et al., 2006.15704).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
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
    """The loss, and the gradients summed over all ranks. No rank waits for another before its backward pass is done."""
    group = mesh.get_group(AXIS)
    clear_grads(params)
    share = share_of_loss(params, batch)
    total = share.detach().clone()
    summed = dist.all_reduce(total, group=group, async_op=True)
    if run.overlap:
        with overlapped_all_reduce(params, group):
            share.backward()
    else:
        share.backward()
        all_reduce_grads(params, group)
    summed.wait()
    return total, grads_of(params)


def all_reduce_grads(params: list[Layer], group: ProcessGroup) -> None:
    """Sum every gradient over the ranks, one by one: dW[D, F] = AllReduce_dp(dW[D, F]{U_dp})."""
    for w, b in reversed(params):
        all_reduce(b.grad, group)
        all_reduce(w.grad, group)


@contextmanager
def overlapped_all_reduce(params: list[Layer], group: ProcessGroup) -> Iterator[None]:
    """Sum the gradients of a backward pass run inside the `with`; done when it ends.

    Gradients become ready from the last layer to the first. Buckets are sent in the order in which that completes them,
    the same on every rank, as collectives must be.
    """
    buckets = make_buckets([p for layer in reversed(params) for p in reversed(layer)])
    missing = [len(bucket) for bucket in buckets]
    sent: list[tuple[Tensor, dist.Work]] = []

    def ready(index: int) -> None:
        missing[index] -= 1
        while len(sent) < len(buckets) and missing[len(sent)] == 0:
            flat = flatten([p.grad for p in buckets[len(sent)]])
            sent.append((flat, dist.all_reduce(flat, group=group, async_op=True)))

    hooks = [
        p.register_post_accumulate_grad_hook(lambda _, index=index: ready(index))
        for index, bucket in enumerate(buckets)
        for p in bucket
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for bucket, (flat, work) in zip(buckets, sent, strict=True):
        work.wait()
        for p, grad in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = grad.view_as(p)


def make_buckets(params: list[Tensor], limit: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """Parameters in buckets of about `limit` bytes, in the order in which the last of each comes in `params`.

    Small gradients share a bucket; one that fills a bucket has it to itself, so that it need not be copied.
    """
    buckets: list[list[Tensor]] = []
    open_bucket, room = [], limit
    for p in params:
        size = p.numel() * p.element_size()
        if size >= limit:
            buckets.append([p])
            continue
        if size > room:
            buckets.append(open_bucket)
            open_bucket, room = [], limit
        open_bucket.append(p)
        room -= size
    return [*buckets, open_bucket] if open_bucket else buckets


def flatten(grads: list[Tensor]) -> Tensor:
    """One contiguous buffer of all elements; a gradient alone in its bucket is sent from where it lies."""
    return grads[0].view(-1) if len(grads) == 1 else torch.cat([g.view(-1) for g in grads])
