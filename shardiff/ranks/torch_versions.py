"""What differs between versions of torch, from 2.11 on, or is not public in it. The rest of the project uses only what
they all have."""

from __future__ import annotations

import torch.distributed as dist

# Collectives whose input and output are one tensor each got these names in torch 2.13, which deprecates the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of this name, under which operators that take no object are given it."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
