"""A barrier among JAX processes, from which timed steps start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def barrier(devices: list[Any]) -> Callable[[], Any]:
    """A function that returns when all ranks have called it: an all_reduce of one number each."""
    mesh = jax.make_mesh((len(devices),), ("all",), devices=devices)
    ones = jax.make_array_from_process_local_data(NamedSharding(mesh, P("all")), np.ones(1, np.float32))
    total = jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=P("all"), out_specs=P())
    add = jax.jit(total).lower(ones).compile()
    return lambda: jax.block_until_ready(add(ones))
