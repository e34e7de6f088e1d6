"""Updated parameters gathered in place, by messages, where the backend's own all_gather is slow.

gloo's all_gather fills a buffer of its own and copies it out, which takes more than twice the processor's time of
sending every rank's rows from where they are to where they belong. The result is that of `whole` of zero1 and zero2,
and so are the bytes. It is an operator of torch, so that a trace shows one all_gather, and not the messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardiff.ranks.torch_versions import group_named
from torch_impl.collectives import wait

ALONE = 2**16  # bytes of a rank's block that is a message of its own; smaller ones are sent as one


def copies_out(group: ProcessGroup) -> bool:
    """Whether the backend's own all_gather writes to a buffer of its own first."""
    return dist.get_backend(group) == "gloo"


@torch.library.custom_op("shardiff::all_gather_coalesced_", mutates_args=("outputs",))
def all_gather_in_place(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group_name: str, async_op: bool = False
) -> None:
    """outputs[i][D, F] = AllGather(inputs[i][D_n, F]), where inputs[i] is this rank's block of outputs[i] along dim 0.

    All have one dtype. Every receive is posted before any message is sent: gloo loses full duplex where a send comes
    first. async_op: always false; a trace reads it.
    """
    group = group_named(group_name)
    rank, n = group.rank(), group.size()
    small = [number for number, mine in enumerate(inputs) if mine.numel() * mine.element_size() < ALONE]
    blocks = [output.chunk(n) for number, output in enumerate(outputs) if number not in small]
    together = inputs[0].new_empty(n, sum(inputs[number].numel() for number in small))
    if small:
        together[rank] = torch.cat([inputs[number].flatten() for number in small])
        blocks.append(together.unbind())

    others = [(rank + distance) % n for distance in range(1, n)]
    works = [dist.irecv(each[other], group=group, group_src=other) for each in blocks for other in others]
    works += [dist.isend(each[rank], group=group, group_dst=other) for each in blocks for other in others]
    for work in works:
        wait(work)
    parts = together.split([inputs[number].numel() for number in small], dim=1)
    for number, part in zip(small, parts, strict=True):
        outputs[number].view(n, -1).copy_(part)
