"""Mistakes in the layers of a block, and in tensor, sequence and expert parallel, in torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shared_tests.meta.mutants.training.mutant import (
    ALL,
    BACKWARD,
    LOST_SUM,
    MOE,
    NORM,
    RAISES,
    SHARDS,
    Mutant,
    of_blocks,
    of_strategy,
)


def in_blocks(name: str, old: str, new: str, claims: Any, **rest: Any) -> Mutant:
    return of_blocks("torch_impl.blocks", name, old, new, claims, **{"strategy": "single_device", "degree": 1, **rest})


BLOCKS = (
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
    of_strategy(
        "megatron_tensor_parallel",
        "no sum where a layer is left",
        "return all_reduce_identity(y, mesh.group(AXIS))",
        "return y",
        {RAISES},
        words="has losses",
    ),
    of_strategy(
        "megatron_tensor_parallel",
        "no sum of gradients where a layer is entered",
        "return identity_all_reduce(x, mesh.group(AXIS))",
        "return x",
        LOST_SUM,
    ),
    of_strategy(
        "megatron_tensor_parallel",
        "a router's gradient not summed",
        "router=identity_all_reduce(layer.router, mesh.group(AXIS))",
        "router=layer.router",
        LOST_SUM,
        problem=MOE,
    ),
    of_strategy(
        "megatron_tensor_parallel",
        "o split by columns",
        "dims = [TENSOR_DIMS.get(type(layer), ROWS if i % 2 else COLUMNS)",
        "dims = [TENSOR_DIMS[type(layer)] if hasattr(layer, 'up') else TENSOR_DIMS[type(layer)]._replace(o=1)",
        {RAISES},
        words="shapes cannot be multiplied",
    ),
    of_strategy(
        "sequence_parallel",
        "a gain's gradient not summed",
        'for name in ("gain", "router")',
        'for name in ("router",)',
        LOST_SUM,
    ),
    of_strategy(
        "sequence_parallel",
        "a router's gradient not summed over parts of the sequence",
        'for name in ("gain", "router")',
        'for name in ("gain",)',
        LOST_SUM,
        problem=MOE,
    ),
    of_strategy(
        "sequence_parallel",
        "every rank has the first part of the sequence",
        "[mesh.rank(AXIS)] for a in batch",
        "[0] for a in batch",
        ALL,
    ),
    of_blocks(
        "torch_impl.train",
        "gains counted by every rank in the gradient norm",
        "for t, own in pairs if own)",
        "for t, own in pairs)",
        {NORM},
        strategy="sequence_parallel",
        mesh="fsdp=2,tp=2",
    ),
    of_blocks(
        "torch_impl.buckets",
        "gradients that come at once, at the end, forgotten",
        "if passes > seen[id(p)]:",
        "if False:",
        {RAISES},
        words="zip",
        strategy="megatron_tensor_parallel",
        mesh="dp=2,pp=2,tp=2",
        problem=replace(MOE, layers=2),
    ),
    # expert parallel
    of_strategy(
        "expert_parallel",
        "experts' gradients summed over the ranks",
        "if dim is None else p for p, dim",
        "if True else p for p, dim",
        BACKWARD,
        problem=MOE,
    ),
    of_strategy(
        "expert_parallel",
        "gradients of what is replicated not summed",
        "identity_all_reduce(p, mesh.group(AXIS)) if dim is None",
        "p if dim is None",
        LOST_SUM,
        problem=MOE,
    ),
    of_strategy(
        "expert_parallel",
        "an expert's gradient times top-k",
        "if dim is None else p for p, dim",
        "if dim is None else 2 * p - p.detach() for p, dim",
        BACKWARD,
        problem=MOE,
    ),
    of_strategy(
        "expert_parallel",
        "tokens sent to the next rank's experts",
        "return all_to_all_back(h, mesh.group(AXIS), split=0, concat=1)",
        "return all_to_all_back(h.roll(len(h) // 2, 0), mesh.group(AXIS), split=0, concat=1)",
        ALL,
        problem=MOE,
    ),
    of_strategy(
        "expert_parallel",
        "another rank's experts held",
        "mesh.split(layer, EXPERT_DIMS[type(layer)], AXIS)",
        "mesh.split(layer._make(p.flip(0) if p.ndim == 3 else p for p in layer), EXPERT_DIMS[type(layer)], AXIS)",
        ALL | {SHARDS},
        problem=MOE,
    ),
)
