"""Pools of ranks for the benchmarks, by the framework's name."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, suppress

from shardiff import hlo
from shardiff.ranks.supervisor import Workers


def workers(framework: str, world_size: int, device: str, timeout: float) -> AbstractContextManager[Workers]:
    """A pool of ranks of "torch" or "jax". JAX's note which collectives a program has."""
    if framework == "torch":
        from shardiff.ranks import torch_pool

        return torch_pool.workers(world_size, device, timeout)
    from shardiff.ranks import jax_pool

    return jax_pool.workers(world_size, device, timeout, describe=collectives_of)


def collectives_of(text: str) -> tuple[int, str]:
    """Payload bytes of all collectives of an HLO text, and how many there are of each op."""
    records = []
    with suppress(ValueError):
        records = hlo.read(text).records
    size = sum(record.payload_bytes * (record.executions.max or 1) for record in records)
    ops = Counter(record.op for record in records)
    return size, ", ".join(f"{count} {op}" for op, count in ops.items()) or "no collectives"
