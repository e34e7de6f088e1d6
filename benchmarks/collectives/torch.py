"""The collectives of torch.distributed, on buffers that exist: what a rank of `shardiff bench collectives` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.collectives.timing import IDENTITIES, Side, expected, lengths, measure, values
from benchmarks.documents.collectives import OPS
from shardiff.ranks.rank import report_progress
from torch_impl import collectives as c


def block(
    device: torch.device, op: str, sizes: Sequence[int], iterations: int, budget: float, bare: bool
) -> list[dict[str, Any]]:
    """`measure` of one collective at each payload in bytes, with whether its values are right."""
    results = []
    for payload in sizes:
        side = make_side(device, op, payload)
        side.wait(side.call())
        correct = side.right(None, 1)
        results.append(
            {"bytes": payload, "runs_as": OPS[op], "correct": correct, **measure(side, iterations, budget, bare)}
        )
        report_progress(payload)
    return results


def make_side(device: torch.device, op: str, payload: int) -> Side:
    """The collective on buffers for one payload, which hold this rank's values."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    length, out_length = lengths(op, payload, ranks)
    own, want = values(rank, 0, length), expected(op, rank, ranks, payload)
    x = torch.from_numpy(own.copy()).to(device)
    out = torch.zeros(out_length, device=device)
    call, buffer = make_call(op, x, out)
    in_place = op in ("reduce", "all_reduce")  # whose sums would grow without end

    def wait(_: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def agree(number: float) -> float:
        shared = torch.tensor(number, dtype=torch.float64, device=device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return shared.item()

    def renew(calls: int) -> None:
        out.zero_()
        x.zero_() if in_place and calls > 1 else x.copy_(torch.from_numpy(own))

    def right(_: Any, calls: int) -> bool:
        if want is None:
            return True
        got = buffer.cpu().numpy()
        return not got.any() if in_place and calls > 1 else np.array_equal(got, want)

    return Side(call, wait, agree, renew=renew, right=right)


def make_call(op: str, x: torch.Tensor, out: torch.Tensor) -> tuple[Callable[[], Any], torch.Tensor]:
    """A function that runs the collective once over all ranks, root 0, and the tensor that then holds its result."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if op == "broadcast":
        return lambda: dist.broadcast(x, 0), x
    if op == "reduce":
        return lambda: dist.reduce(x, 0), x
    if op == "all_reduce":
        return lambda: dist.all_reduce(x), x
    if op == "scatter":
        blocks = list(x.chunk(ranks)) if rank == 0 else None
        return lambda: dist.scatter(out, blocks, 0), out
    if op == "gather":
        blocks = list(out.chunk(ranks)) if rank == 0 else None
        return lambda: dist.gather(x, blocks, 0), out
    if op == "all_gather":
        return lambda: c.all_gather_single(out, x), out
    if op == "reduce_scatter":
        return lambda: c.reduce_scatter_single(out, x), out
    if op == "all_to_all":
        return lambda: dist.all_to_all_single(out, x), out
    if ranks == 1:
        return lambda: out.copy_(x), out

    def permute() -> None:
        sends = dist.P2POp(dist.isend, x, (rank + 1) % ranks)
        receives = dist.P2POp(dist.irecv, out, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([receives, sends]):  # gloo sends both ways at once only in this order
            work.wait()

    return permute, out


def identities(device: torch.device, payload: int) -> dict[str, float]:
    """One of IDENTITIES -> the largest difference between its two sides on this rank. payload: S in bytes."""
    rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert world is not None
    x = torch.from_numpy(values(rank, 0, payload // 4)).to(device)
    own = torch.zeros(ranks, *x.shape, device=device)
    own[rank] = x
    blocks = c.all_gather(x, world).view(ranks, ranks, -1)
    gathered, placed = c.gather(x, 0, world), c.reduce(own.flatten(), 0, world)
    pairs = (
        (c.all_reduce(x.clone(), world), c.all_gather(c.reduce_scatter(x, world), world)),
        (c.all_to_all(x, world), blocks.transpose(0, 1)[rank].flatten()),
        (x if gathered is None else gathered, x if placed is None else placed),
    )
    differences = [(one - other).abs().max().item() for one, other in pairs]
    return dict(zip(IDENTITIES, differences, strict=True))
