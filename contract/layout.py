"""Which part of the full model each rank holds. Both sides are held to it, and it puts their shards together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from contract.problem import Layer, split_slices
from contract.strategy import Run


class Part(NamedTuple):
    """Layer number `layer` as one rank holds it: the slices that cut w[in, out] and b[out]."""

    layer: int
    w: tuple[slice, slice]
    b: tuple[slice]


WHOLE = slice(None)


def layout(run: Run) -> list[list[Part]]:
    """For each rank, the parts that it holds, in the order of the layers."""
    return [_parts(run, rank) for rank in range(run.degree)]


def _parts(run: Run, rank: int) -> list[Part]:
    layers = range(run.problem.layers)
    if run.strategy == "pipeline_parallel":
        stage = split_slices(run.problem.layers, run.degree)[rank]
        return [Part(i, (WHOLE, WHOLE), (WHOLE,)) for i in layers[stage]]
    mine = split_slices(run.problem.width, run.degree)[rank]
    column, row = ((WHOLE, mine), (mine,)), ((mine, WHOLE), (WHOLE,))
    if run.strategy == "tensor_parallel":
        return [Part(i, *column) for i in layers]
    if run.strategy == "megatron_tensor_parallel":
        return [Part(i, *(row if i % 2 else column)) for i in layers]
    return [Part(i, (WHOLE, WHOLE), (WHOLE,)) for i in layers]


def names(part: Part) -> tuple[str, str]:
    """The names of a part's two parameters: w3, b3."""
    return f"w{part.layer}", f"b{part.layer}"


def cut(params: Sequence[Layer], parts: Sequence[Part]) -> list[Layer]:
    """One rank's shards of full parameters, as views."""
    return [Layer(params[p.layer].w[p.w], params[p.layer].b[p.b]) for p in parts]


def merge(run: Run, shards: Sequence[Sequence[Layer]]) -> list[Layer]:
    """Full parameters from every rank's shards: the inverse of `cut` over all ranks.

    Where ranks hold replicas the lowest rank's is taken, so the others may be None; that replicas agree is for
    `Shard.digests` to show. Raises ValueError if a shard does not have the shape that the layout gives it.
    """
    d, dtype = run.problem.width, next(a.dtype for rank in shards for layer in rank for a in layer if a is not None)
    full = [Layer(np.full((d, d), np.nan, dtype), np.full(d, np.nan, dtype)) for _ in range(run.problem.layers)]
    for rank, (parts, owner) in enumerate(zip(layout(run), owned(run), strict=True)):
        if len(parts) != len(shards[rank]):
            raise ValueError(f"rank {rank} holds {len(shards[rank])} layers where the layout says {len(parts)}")
        for part, layer, owns in zip(parts, shards[rank], owner, strict=True):
            for name, whole, index, shard, own in zip(
                names(part), full[part.layer], part[1:], layer, owns, strict=True
            ):
                if not own:
                    continue
                if whole[index].shape != shard.shape:
                    want = whole[index].shape
                    raise ValueError(f"rank {rank} holds {name} as {shard.shape} where the layout says {want}")
                whole[index] = shard
    return full


def owned(run: Run) -> list[list[tuple[bool, bool]]]:
    """For each rank and part, whether it is the lowest that holds (w, b): a sum over owners counts each once."""
    seen: set[tuple[str, str]] = set()
    flags = []
    for parts in layout(run):
        row = []
        for part in parts:
            keys = [(name, str(index)) for name, index in zip(names(part), part[1:], strict=True)]
            row.append((keys[0] not in seen, keys[1] not in seen))
            seen.update(keys)
        flags.append(row)
    return flags
