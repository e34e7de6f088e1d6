"""What differs between versions of jax, from 0.10.2 on. The rest of the project uses only what they all have."""

from __future__ import annotations

from typing import Any

import jax


def mock_hosts(count: int) -> None:
    """Have jax's CUDA client, before it starts, behave as the first of so many hosts of as many GPUs as are here.

    Programs are compiled for all of them, and their collectives do nothing. The option is jax's own, for testing.
    Raises RuntimeError if this version has no such option.
    """
    try:
        jax.config.update("jax_mock_gpu_topology", f"1x{count}x1")
    except AttributeError:
        raise RuntimeError(f"jax {jax.__version__} has no mock topology of GPUs") from None


def varies_over(x: Any) -> frozenset[str]:
    """The mesh axes over which an array inside shard_map may differ from rank to rank."""
    kind: Any = jax.typeof(x)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma
