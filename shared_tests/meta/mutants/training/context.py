"""Mistakes in strategies that split the sequence of a transformer over `cp`, in torch."""

from __future__ import annotations

from typing import Any

from shared_tests.meta.mutants.training.mutant import (
    ALL,
    BACKWARD,
    RAISES,
    Mutant,
    of_blocks,
    of_strategy,
)


def in_ring(name: str, old: str, new: str, claims: Any, **rest: Any) -> Mutant:
    return of_strategy("ring_attention", name, old, new, claims, **rest)


def in_softmax(name: str, old: str, new: str, claims: Any, **rest: Any) -> Mutant:
    return of_blocks("torch_impl.online_softmax", name, old, new, claims, strategy="ring_attention", **rest)


CONTEXT = (
    # context parallel
    of_strategy(
        "context_parallel",
        "a mask off by one shard",
        "mesh.rank(AXIS) * q.shape[1])",
        "(mesh.rank(AXIS) + 1) * q.shape[1])",
        ALL,
    ),
    of_strategy(
        "context_parallel",
        "every rank's queries at the start of the sequence",
        "mesh.rank(AXIS) * q.shape[1])",
        "0)",
        ALL,
    ),
    of_strategy(
        "context_parallel",
        "keys' gradients counted twice",
        "all_gather_reduce_scatter(a, mesh.group(AXIS), dim=1) for",
        "all_gather_reduce_scatter(2 * a - a.detach(), mesh.group(AXIS), dim=1) for",
        BACKWARD,
    ),
    in_ring("the late pieces in the order of the ranks", "of[2 * n - 1 - rank]", "of[n + rank]", ALL),
    of_blocks(
        "torch_impl.collectives",
        "the ring goes the wrong way",
        "dist.isend, x, group=group, group_peer=(rank + 1) % n",
        "dist.isend, x, group=group, group_peer=(rank - 1) % n",
        ALL,
        more=(
            ("arriving, group=group, group_peer=(rank - 1) % n", "arriving, group=group, group_peer=(rank + 1) % n"),
        ),
        strategy="ring_attention",
        degree=4,
    ),
    in_ring(
        "the mask of a rank's own piece lost",
        "attend_to(queries, *wide(kv), causal=True)",
        "attend_to(queries, *wide(kv), causal=False)",
        ALL,
    ),
    in_ring(
        "the mask of a rank's own piece lost in the backward pass",
        "attend_back(*of_queries, *wide(kv), causal=True)",
        "attend_back(*of_queries, *wide(kv), causal=False)",
        BACKWARD,
    ),
    in_ring("earlier and later ranks confused", "if source < rank else", "if source > rank else", ALL),
    in_ring(
        "dk and dv not brought home",
        "works, dkv = pass_on(dkv.to(kv.dtype), group)",
        "works, dkv = pass_on(dkv.to(kv.dtype), group) if source != (rank + 1) % group.size() else ([], dkv)",
        BACKWARD,
    ),
    in_ring("dk and dv start anew on every rank", "dkv = wide(dkv)", "dkv = torch.zeros_like(dkv)", BACKWARD),
    in_ring("dq of the keys of other ranks lost", "dq[:, :, rows] += dqi", "dq[:, :, rows] += 0", BACKWARD),
    in_ring(
        "loss not summed over the parts of the sequence",
        "return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)",
        "return None",
        {RAISES},
        words="has losses",
        overlap=False,
    ),
    in_softmax(
        "no rescale of what the softmax has so far", "out.mul_(so_far.sub_(total).exp_()).add_(", "out.add_(", ALL
    ),
    in_softmax("logarithms of sums added", "torch.logaddexp(so_far, of_part)", "so_far + of_part", ALL),
    in_softmax("the sum so far not kept", "    so_far.copy_(total)\n", "", ALL, degree=4),
    of_blocks(
        "torch_impl.fused_attention",
        "the backward pass of a softmax without its sum",
        "of_whole = out, ",
        "of_whole = torch.zeros_like(out), ",
        BACKWARD,
        strategy="ring_attention",
    ),
    of_strategy(
        "ulysses",
        "split and concat swapped on the way back",
        "group, split=1, concat=2)",
        "group, split=2, concat=1)",
        {RAISES},
    ),
    of_strategy("ulysses", "queries stay where they are", "for a in (q, k, v))", "for a in (q, k, v.flip(2)))", ALL),
    of_blocks(
        "torch_impl.collectives",
        "the backward pass of an all_to_all not its inverse",
        "ctx.back = group, concat, split",
        "ctx.back = group, split, concat",
        {RAISES},
        strategy="ulysses",
    ),
)
