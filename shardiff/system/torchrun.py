"""Whether torchrun started this process, and as which of its ranks: asked here, and nowhere else."""

from __future__ import annotations

import os
from dataclasses import dataclass

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torch.distributed needs to find the other ranks


@dataclass(frozen=True)
class Started:
    """This process's place among those that torchrun started.

    has_store: torchrun's agent runs the store at MASTER_ADDR:MASTER_PORT. Otherwise rank 0 must run it, as is the case
    where another program has set torchrun's variables.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    has_store: bool


def started() -> Started | None:
    """What torchrun's environment variables say; None if this process is not one of torchrun's.

    Raises ValueError, one line, for values that cannot be.
    """
    if not all(os.environ.get(name) for name in NEEDED):
        return None
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if rank >= world_size:
        raise ValueError(f"RANK must be below WORLD_SIZE, got {rank} and {world_size}")
    local_rank, local_world_size = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", world_size)
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Started(rank, world_size, local_rank, local_world_size, has_store)


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} must be a number, got {text!r}")
    return int(text)
