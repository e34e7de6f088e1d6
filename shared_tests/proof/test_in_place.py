"""What torch_impl.in_place gathers by messages is what all_gather gathers, and a trace shows it as one all_gather."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardiff.tracing.tracer import capture
from torch_impl.in_place import ALONE, all_gather_in_place, copies_out

SHAPES = ((8, ALONE // 8), (8,), (4, 3), (8, ALONE // 4))  # blocks that are messages of their own, and that are not


def gathered_in_place(device, ranks):
    """On every rank: the tensors that are gathered in place, what they should be, and the calls that are traced."""
    group = dist.new_group(list(range(ranks)))
    assert copies_out(group)
    n, rank = group.size(), group.rank()
    want = [torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 1 for shape in SHAPES]
    got = [torch.zeros_like(t) for t in want]
    for ours, t in zip(got, want, strict=True):
        ours.chunk(n)[rank].copy_(t.chunk(n)[rank])
    with capture() as calls:
        all_gather_in_place(got, [t.chunk(n)[rank] for t in got], group.group_name)
    dist.destroy_process_group(group)
    equal = [torch.equal(ours, t) for ours, t in zip(got, want, strict=True)]
    return equal, [(c.op, c.payload_bytes, len(c.parts), c.is_async) for c in calls if c.op not in ("wait", "mark")]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_messages_put_every_block_in_its_place_and_are_traced_as_the_gather_that_they_are(ranks, pool):
    size = 8 * sum(torch.Size(shape).numel() for shape in SHAPES)
    for equal, calls in pool.call(gathered_in_place, ranks, world_size=ranks):
        assert equal == [True] * len(SHAPES)
        assert calls == [("all_gather", size, len(SHAPES), False)]
