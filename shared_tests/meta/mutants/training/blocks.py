"""Mistakes in the blocks of a transformer and in the strategies that cut inside them."""

from __future__ import annotations

from typing import Any

from contract.transformer import Transformer
from shared_tests.meta.mutants.training.mutant import (
    ALL,
    BACKWARD,
    NORM,
    RAISES,
    REPLICAS,
    SHARDS,
    Mutant,
    mutant,
)

MLP = Transformer(batch=4, width=16, layers=1, dtype="float64", sequence=8, heads=4, ff=24)
MOE = Transformer(batch=4, width=16, layers=1, dtype="float64", sequence=8, heads=4, ff=24, experts=4)
LOST_SUM = BACKWARD | {REPLICAS}


def planted(module: str, name: str, old: str, new: str, claims: Any, **rest: Any) -> Mutant:
    return mutant(name, module, old, new, claims, **{"problem": MLP, **rest})


def in_blocks(name: str, old: str, new: str, claims: Any, **rest: Any) -> Mutant:
    return planted("torch_impl.blocks", name, old, new, claims, **{"strategy": "single_device", "degree": 1, **rest})


def in_ring(name: str, old: str, new: str, claims: Any, **rest: Any) -> Mutant:
    return planted("torch_impl.explicit.ring_attention", name, old, new, claims, **rest)


def in_softmax(name: str, old: str, new: str, claims: Any, **rest: Any) -> Mutant:
    return planted("torch_impl.online_softmax", name, old, new, claims, strategy="ring_attention", **rest)


def of(strategy: str, name: str, old: str, new: str, claims: Any, **rest: Any) -> Mutant:
    return planted(f"torch_impl.explicit.{strategy}", name, old, new, claims, **rest)


def in_jax(module: str, name: str, old: str, new: str, claims: Any, **rest: Any) -> Mutant:
    return planted(f"jax_impl.{module}", name, old, new, claims, **rest)


IN_TORCH = (
    # the layers
    in_blocks(
        "a causal mask that lets a token see the next one",
        "triu(first + 1)",
        "triu(first + 2)",
        ALL,
    ),
    in_blocks(
        "scores divided by the root of a rank's width instead of a head's",
        "q, k) * q.shape[-1] ** -0.5",
        "q, k) * (q.shape[-1] * q.shape[-2]) ** -0.5",
        ALL,
        strategy="megatron_tensor_parallel",
        degree=2,
    ),
    in_blocks(
        "epsilon outside of the norm's root",
        "torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)",
        "(1 / (wide.square().mean(-1, keepdim=True).sqrt() + EPSILON))",
        ALL,
    ),
    in_blocks(
        "the residual added before the sum over the ranks",
        'x = x + self.at("leave", LAYERS[type(layer)](self, layer, h, mesh), mesh)',
        'x = self.at("leave", x + LAYERS[type(layer)](self, layer, h, mesh), mesh)',
        ALL,
        strategy="megatron_tensor_parallel",
        degree=2,
    ),
    in_blocks(
        "gates not normalized",
        "(top / top.sum(-1, keepdim=True))",
        "top",
        ALL,
        problem=MOE,
    ),
    in_blocks(
        "experts' outputs combined without the gates",
        "slots * gates[..., None, None], out)",
        "slots + 0 * gates[..., None, None], out)",
        ALL,
        problem=MOE,
    ),
    in_blocks(
        "second choices served before first ones",
        "queue = chosen.transpose(1, 2).flatten(1, 2)",
        "queue = chosen.transpose(1, 2).flip(1).flatten(1, 2)",
        ALL,
        more=((".unflatten(1, (problem.top_k, -1)).", ".unflatten(1, (problem.top_k, -1)).flip(1)."),),
        problem=MOE,
    ),
    in_blocks(
        "samples compete for an expert's places",
        "(queue.cumsum(1) - queue)",
        "(queue.flatten(0, 1).cumsum(0).view_as(queue) - queue)",
        ALL,
        problem=MOE,
    ),
    in_blocks(
        "a capacity of a rank's share of the tokens",
        "torch.arange(problem.capacity, device",
        "torch.arange(problem.capacity, device=logits.device).clamp(max=problem.capacity // 2 - 1); _ = dict(device",
        ALL,
        problem=MOE,
    ),
    # tensor and sequence parallel
    of(
        "megatron_tensor_parallel",
        "no sum where a layer is left",
        "return all_reduce_identity(y, mesh.group(AXIS))",
        "return y",
        {RAISES},
        words="has losses",
    ),
    of(
        "megatron_tensor_parallel",
        "no sum of gradients where a layer is entered",
        "return identity_all_reduce(x, mesh.group(AXIS))",
        "return x",
        LOST_SUM,
    ),
    of(
        "megatron_tensor_parallel",
        "a router's gradient not summed",
        "router=identity_all_reduce(layer.router, mesh.group(AXIS))",
        "router=layer.router",
        LOST_SUM,
        problem=MOE,
    ),
    of(
        "megatron_tensor_parallel",
        "o split by columns",
        "dims = [TENSOR_DIMS.get(type(layer), ROWS if i % 2 else COLUMNS)",
        "dims = [TENSOR_DIMS[type(layer)] if hasattr(layer, 'up') else TENSOR_DIMS[type(layer)]._replace(o=1)",
        {RAISES},
        words="shapes cannot be multiplied",
    ),
    of(
        "sequence_parallel",
        "a gain's gradient not summed",
        'for name in ("gain", "router")',
        'for name in ("router",)',
        LOST_SUM,
    ),
    of(
        "sequence_parallel",
        "a router's gradient not summed over parts of the sequence",
        'for name in ("gain", "router")',
        'for name in ("gain",)',
        LOST_SUM,
        problem=MOE,
    ),
    of(
        "sequence_parallel",
        "every rank has the first part of the sequence",
        "[mesh.rank(AXIS)] for a in batch",
        "[0] for a in batch",
        ALL,
    ),
    planted(
        "torch_impl.train",
        "gains counted by every rank in the gradient norm",
        "for t, own in pairs if own)",
        "for t, own in pairs)",
        {NORM},
        strategy="sequence_parallel",
        mesh="fsdp=2,tp=2",
    ),
    planted(
        "torch_impl.buckets",
        "gradients that come at once, at the end, forgotten",
        "if passes > seen[id(p)]:",
        "if False:",
        {RAISES},
        words="zip",
        strategy="megatron_tensor_parallel",
        mesh="dp=2,pp=2,tp=2",
        problem=Transformer(4, 16, 2, "float64", sequence=8, heads=4, ff=24, experts=4),
    ),
    # context parallel
    of(
        "context_parallel",
        "a mask off by one shard",
        "mesh.rank(AXIS) * q.shape[1])",
        "(mesh.rank(AXIS) + 1) * q.shape[1])",
        ALL,
    ),
    of(
        "context_parallel",
        "every rank's queries at the start of the sequence",
        "mesh.rank(AXIS) * q.shape[1])",
        "0)",
        ALL,
    ),
    of(
        "context_parallel",
        "keys' gradients counted twice",
        "all_gather_reduce_scatter(a, mesh.group(AXIS), dim=1) for",
        "all_gather_reduce_scatter(2 * a - a.detach(), mesh.group(AXIS), dim=1) for",
        BACKWARD,
    ),
    in_ring("the late pieces in the order of the ranks", "of[2 * n - 1 - rank]", "of[n + rank]", ALL),
    planted(
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
        "wide(kv[..., columns, :]), causal=source == rank)",
        "wide(kv[..., columns, :]), causal=False)",
        ALL,
    ),
    in_ring(
        "the mask of a rank's own piece lost in the backward pass",
        "causal=source == group.rank())",
        "causal=False)",
        BACKWARD,
    ),
    in_ring("earlier and later ranks confused", "if source < rank else", "if source > rank else", ALL),
    in_ring(
        "dk and dv not brought home",
        "works, dkv = pass_on(dkv.to(kv.dtype), group)",
        "works, dkv = pass_on(dkv.to(kv.dtype), group) if source != (group.rank() + 1) % group.size() else ([], dkv)",
        BACKWARD,
    ),
    in_ring("dk and dv start anew on every rank", "dkv = wide(dkv)", "dkv = torch.zeros_like(dkv)", BACKWARD),
    in_ring("dq not scaled", "dq.mul_(scale)", "dq", BACKWARD),
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
    in_softmax("the backward pass of a softmax without its sum", ".sub_(weighted)", "", BACKWARD),
    of(
        "ulysses",
        "split and concat swapped on the way back",
        "group, split=1, concat=2)",
        "group, split=2, concat=1)",
        {RAISES},
    ),
    of("ulysses", "queries stay where they are", "for a in (q, k, v))", "for a in (q, k, v.flip(2)))", ALL),
    planted(
        "torch_impl.collectives",
        "the backward pass of an all_to_all not its inverse",
        "ctx.back = group, concat, split",
        "ctx.back = group, split, concat",
        {RAISES},
        strategy="ulysses",
    ),
    # expert parallel
    of(
        "expert_parallel",
        "experts' gradients summed over the ranks",
        "if dim is None else p for p, dim",
        "if True else p for p, dim",
        BACKWARD,
        problem=MOE,
    ),
    of(
        "expert_parallel",
        "gradients of what is replicated not summed",
        "identity_all_reduce(p, mesh.group(AXIS)) if dim is None",
        "p if dim is None",
        LOST_SUM,
        problem=MOE,
    ),
    of(
        "expert_parallel",
        "an expert's gradient times top-k",
        "if dim is None else p for p, dim",
        "if dim is None else 2 * p - p.detach() for p, dim",
        BACKWARD,
        problem=MOE,
    ),
    of(
        "expert_parallel",
        "tokens sent to the next rank's experts",
        "return all_to_all_back(h, mesh.group(AXIS), split=0, concat=1)",
        "return all_to_all_back(h.roll(len(h) // 2, 0), mesh.group(AXIS), split=0, concat=1)",
        ALL,
        problem=MOE,
    ),
    of(
        "expert_parallel",
        "another rank's experts held",
        "mesh.split(layer, EXPERT_DIMS[type(layer)], AXIS)",
        "mesh.split(layer._make(p.flip(0) if p.ndim == 3 else p for p in layer), EXPERT_DIMS[type(layer)], AXIS)",
        ALL | {SHARDS},
        problem=MOE,
    ),
)

IN_JAX = (
    in_jax(
        "blocks",
        "a causal mask that lets a token see the next one, in JAX",
        "first + jnp.arange(q.shape[1])[:, None] >=",
        "first + 1 + jnp.arange(q.shape[1])[:, None] >=",
        ALL,
        strategy="single_device",
        degree=1,
    ),
    in_jax(
        "blocks",
        "epsilon outside of the norm's root, in JAX",
        "lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + EPSILON)",
        "(1 / (jnp.sqrt(jnp.mean(jnp.square(wide), -1, keepdims=True)) + EPSILON))",
        ALL,
        strategy="single_device",
        degree=1,
    ),
    in_jax(
        "blocks",
        "gates not normalized, in JAX",
        "(top / jnp.sum(top, -1, keepdims=True))",
        "top",
        ALL,
        strategy="expert_parallel",
        problem=MOE,
        of_both="annotated",
    ),
    in_jax(
        "blocks",
        "the residual added before the sum over the ranks, in shard_map",
        'x = x + self.at("leave", LAYERS[type(layer)](self, layer, h))',
        'x = self.at("leave", x + LAYERS[type(layer)](self, layer, h))',
        ALL,
        strategy="megatron_tensor_parallel",
    ),
    in_jax(
        "shard_map.megatron_tensor_parallel",
        "no sum where a layer is left, in shard_map",
        "return all_reduce(y, AXIS)",
        "return y",
        {RAISES},
        words="pcast",
    ),
    in_jax(
        "shard_map.context_parallel",
        "a mask off by one shard, in shard_map",
        "lax.axis_index(AXIS) * q.shape[1])",
        "(lax.axis_index(AXIS) + 1) * q.shape[1])",
        ALL,
    ),
    in_jax(
        "shard_map.ring_attention",
        "the late pieces in the order of the ranks, in shard_map",
        "for i in (rank, 2 * n - 1 - rank)]",
        "for i in (rank, n + rank)]",
        ALL,
    ),
    in_jax(
        "shard_map.ring_attention",
        "the ring goes the wrong way, in shard_map",
        "[(source, (source + 1) % n) for source in range(n)]",
        "[(source, (source - 1) % n) for source in range(n)]",
        ALL,
        degree=4,
    ),
    in_jax(
        "shard_map.ring_attention",
        "earlier and later ranks confused, in shard_map",
        "earlier = (rank - turn) % n < rank",
        "earlier = (rank - turn) % n > rank",
        ALL,
    ),
    in_jax(
        "online_softmax",
        "logarithms of sums added, in shard_map",
        "jnp.logaddexp(one[1], other[1])",
        "one[1] + other[1]",
        ALL,
        strategy="ring_attention",
    ),
    in_jax(
        "shard_map.ulysses",
        "split and concat swapped on the way back, in shard_map",
        "AXIS, split=1, concat=2)",
        "AXIS, split=2, concat=1)",
        {RAISES},
    ),
    in_jax(
        "shard_map.expert_parallel",
        "tokens sent to the next rank's experts, in shard_map",
        "return all_to_all_dims(h, AXIS, split=0, concat=1)",
        "return all_to_all_dims(h[::-1], AXIS, split=0, concat=1)",
        ALL,
        problem=MOE,
    ),
    in_jax(
        "transformer",
        "queries and keys confused",
        "jnp.stack([self.q[...], self.k[...], self.v[...]], 1)",
        "jnp.stack([self.v[...], self.k[...], self.q[...]], 1)",
        ALL,
        strategy="sequence_parallel",
        of_both="annotated",
    ),
    in_jax(
        "transformer",
        "experts' outputs combined without the gates, annotated",
        "slots * gates[..., None, None], out)",
        "slots, out)",
        ALL,
        strategy="expert_parallel",
        problem=MOE,
        of_both="annotated",
    ),
    in_jax(
        "annotated.expert_parallel",
        "the experts' split not stated",
        '    "expert": AXIS,  # a rank\'s experts: up[E_ep, D, F], down[E_ep, F, D]\n',
        "",
        {RAISES},
        words="where the layout says",
        problem=MOE,
    ),
)

BLOCKS = (*IN_TORCH, *IN_JAX)
