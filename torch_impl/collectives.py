"""The eight collectives over the ranks of a group, and the autograd pairs made of them.

The pictures show ranks 0 and 1 before and after. `A0 A1` are the two blocks of rank 0's tensor along `dim`, `+` is the
elementwise sum, `.` is nothing. S is the payload in bytes as nccl-tests counts it, and wire is what a rank must send.
Ranks, including the root, are numbered within the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardiff.ranks.torch_versions import all_gather_single, reduce_scatter_single

__tracebackhide__ = True  # what a traced call names as its source is the line that calls a function of this file


def broadcast(x: Tensor, root: int, group: ProcessGroup) -> Tensor:
    """Everyone gets the root's tensor, in place. S = x, wire S.

    rank 0: A      =>  A
    rank 1: .      =>  A
    """
    flat = x.contiguous()  # gloo would take its elements as they lie in memory
    dist.broadcast(flat, group_src=root, group=group)
    return x if flat is x else x.copy_(flat)


def scatter(x: Tensor | None, root: int, group: ProcessGroup, like: Tensor) -> Tensor:
    """Rank r gets block r of the root's tensor, with the shape of `like`. S = the root's tensor, wire (n-1)/n S.

    rank 0: A0 A1  =>  A0
    rank 1: .      =>  A1
    """
    blocks = None if x is None else [block.contiguous() for block in x.chunk(group.size())]
    out = like.new_empty(like.shape)
    dist.scatter(out, blocks, group_src=root, group=group)
    return out


def gather(x: Tensor, root: int, group: ProcessGroup) -> Tensor | None:
    """The root gets every rank's tensor, concatenated; the others get None. S = the root's result, wire (n-1)/n S.

    rank 0: A      =>  A B
    rank 1: B      =>  .
    """
    x = x.contiguous()
    blocks = [torch.empty_like(x) for _ in range(group.size())] if group.rank() == root else None
    dist.gather(x, blocks, group_dst=root, group=group)
    return None if blocks is None else torch.cat(blocks)


def reduce(x: Tensor, root: int, group: ProcessGroup) -> Tensor | None:
    """The root gets the sum, in place; the others get None. S = x, wire S.

    rank 0: A      =>  A+B
    rank 1: B      =>  .
    """
    flat = x.contiguous()
    dist.reduce(flat, group_dst=root, group=group)
    if group.rank() != root:
        return None
    return x if flat is x else x.copy_(flat)


def all_gather(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """Everyone gets every rank's tensor, concatenated along `dim`. S = the result, wire (n-1)/n S.

    rank 0: A      =>  A B
    rank 1: B      =>  A B
    """
    blocks = x.new_empty(group.size(), *x.shape)
    all_gather_single(blocks.flatten(0, 1), x.contiguous(), group=group)
    return blocks.movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """Rank r gets block r of the sum; `dim` must divide by n. S = x, wire (n-1)/n S.

    rank 0: A0 A1  =>  A0+B0
    rank 1: B0 B1  =>  A1+B1
    """
    blocks = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    out = torch.empty_like(blocks[0])
    reduce_scatter_single(out, blocks.flatten(0, 1), group=group)
    return out


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Everyone gets the sum, in place. S = x, wire 2 (n-1)/n S: that of a reduce_scatter and an all_gather.

    rank 0: A      =>  A+B
    rank 1: B      =>  A+B
    """
    flat = x.contiguous()
    dist.all_reduce(flat, group=group)
    return x if flat is x else x.copy_(flat)


def all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    """Rank r gets block r of every rank's tensor: a transpose over ranks. S = x, wire (n-1)/n S.

    rank 0: A0 A1  =>  A0 B0
    rank 1: B0 B1  =>  A1 B1
    """
    x = x.contiguous()  # so that `out` is contiguous, too: empty_like keeps strides
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def pass_on(x: Tensor, group: ProcessGroup) -> tuple[list[dist.Work], Tensor]:
    """Start to send `x` to the next rank, and to receive the previous rank's, which is returned. S = x, wire S.

    rank 0: A      =>  B
    rank 1: B      =>  A
    """
    rank, n, x = group.rank(), group.size(), x.contiguous()
    if n == 1:
        return [], x
    arriving = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % n)
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % n)
    return dist.batch_isend_irecv([send, receive]), arriving


def wait(work: dist.Work | None) -> None:
    """Wait for a collective that was started with async_op=True."""
    assert work is not None  # this rank is in the group
    work.wait()


def all_gather_flat(shards: Sequence[Tensor], group: ProcessGroup) -> tuple[Tensor, ...]:
    """Several tensors gathered along dim 0 in one call, through one flat buffer."""
    flat = all_gather(torch.cat([shard.detach().flatten() for shard in shards]), group).view(group.size(), -1)
    parts = flat.split([shard.numel() for shard in shards], dim=1)
    return tuple(part.reshape(-1, *shard.shape[1:]) for part, shard in zip(parts, shards, strict=True))


def reduce_scatter_flat(wholes: Sequence[Tensor], group: ProcessGroup) -> tuple[Tensor, ...]:
    """Several tensors summed and split along dim 0 in one call, through one flat buffer."""
    n = group.size()
    flat = reduce_scatter(torch.cat([whole.reshape(n, -1) for whole in wholes], dim=1), group).flatten()
    parts = flat.split([whole.numel() // n for whole in wholes])
    return tuple(part.view(-1, *whole.shape[1:]) for part, whole in zip(parts, wholes, strict=True))


# The autograd pairs. Each is named after its two halves, forward_backward. The backward half is the transpose of the
# forward half, seen as a linear map over all ranks, if the loss is the sum of what the ranks hold.


class _AllGatherReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grads[0], ctx.group, ctx.dim), None, None


class _ReduceScatterAllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grads[0], ctx.group, ctx.dim), None, None


class _IdentityAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        node: Any = x.grad_fn
        if hasattr(node, "again"):  # if x can be gathered again, so can this
            ctx.note, ctx.again = (lambda _, do=do: do(x.output_nr) for do in (node.note, node.again))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _AllReduceIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _AllGatherReduceScatterFlat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        # What `torch_impl.gather_again` calls.
        ctx.note, ctx.again = lambda i: None, lambda i: all_gather(shards[i].detach(), group)
        return all_gather_flat(shards, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *reduce_scatter_flat(grads, ctx.group)


class _AllToAllBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, split: int, concat: int) -> Tensor:
        ctx.back = group, concat, split
        return all_to_all_dims(x, group, split, concat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all_dims(grads[0], *ctx.back), None, None, None


def all_to_all_dims(x: Tensor, group: ProcessGroup, split: int, concat: int) -> Tensor:
    """all_to_all of the blocks of dim `split`; those that arrive are concatenated along dim `concat`."""
    n = group.size()
    arrived = all_to_all(torch.stack(x.chunk(n, split)).flatten(0, 1), group).unflatten(0, (n, -1))
    return torch.cat(arrived.unbind(), concat)


def all_gather_reduce_scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Forward: gather the shards. Backward: every rank used the whole, so sum their gradients and split the sum."""
    return _AllGatherReduceScatter.apply(x, group, dim)


def all_gather_reduce_scatter_flat(shards: Sequence[Tensor], group: ProcessGroup) -> tuple[Tensor, ...]:
    """The same for several tensors, along dim 0 and in one call each way."""
    return _AllGatherReduceScatterFlat.apply(group, *shards)


def reduce_scatter_all_gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Forward: sum partial results and split the sum. Backward: gather the gradients of the shards."""
    return _ReduceScatterAllGather.apply(x, group, dim)


def identity_all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Megatron's f (Shoeybi et al., 1909.08053). Forward: nothing. Backward: sum the gradients of all uses of x."""
    return _IdentityAllReduce.apply(x, group)


def all_reduce_identity(x: Tensor, group: ProcessGroup) -> Tensor:
    """Megatron's g. Forward: sum partial results. Backward: nothing, every rank has the gradient of the sum."""
    return _AllReduceIdentity.apply(x, group)


def all_to_all_back(x: Tensor, group: ProcessGroup, split: int, concat: int) -> Tensor:
    """Forward: send block r of dim `split` to rank r, join what arrives along dim `concat`. Backward: its inverse."""
    return _AllToAllBack.apply(x, group, split, concat)
