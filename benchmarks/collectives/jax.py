"""The collectives of JAX under shard_map, compiled: what a rank of `shardiff bench collectives` runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives.timing import IDENTITIES, Side, expected, lengths, measure, values
from jax_impl import collectives as c
from shardiff import hlo

IN_FLIGHT = 4 * 2**20  # bytes of results that may wait in memory: with more, fresh pages are what is timed


def block(op: str, sizes: Sequence[int], iterations: int, budget: float, bare: bool) -> list[dict[str, Any]]:
    """`measure` of one collective at each payload in bytes, with whether its values are right."""
    rank, ranks = jax.process_index(), jax.process_count()
    largest = compiled(lambda x: jax.lax.pmax(x, "x"), np.zeros(1, np.float32))

    def agree(number: float) -> float:
        return float(local(largest(on_ranks(np.full(1, number, np.float32))))[0])

    results = []
    for payload in sizes:
        x = on_ranks(values(rank, 0, lengths(op, payload, ranks)[0]))
        run = compiled(functools.partial(collective, op), local(x))
        right = functools.partial(is_right, expected(op, rank, ranks, payload))
        correct = right(run(x), 1)
        depth = max(1, min(32, IN_FLIGHT // payload))
        side = Side(functools.partial(run, x), jax.block_until_ready, agree, depth, right=right)
        runs_as = " + ".join(sorted({record.op for record in hlo.read(run.as_text()).records})) or "copy"
        times = measure(side, iterations, budget, bare)
        results.append({"bytes": payload, "runs_as": runs_as, "correct": correct, **times})
    return results


def is_right(want: np.ndarray | None, result: jax.Array, calls: int) -> bool:
    """Whether this rank's block of a result, which every call makes anew, has the values that it should have."""
    return want is None or np.array_equal(local(result), want)


def collective(op: str, x: jax.Array) -> jax.Array:
    """One collective over the axis, root 0, inside shard_map."""
    if op in ("broadcast", "scatter", "gather", "reduce"):
        return getattr(c, op)(x, 0, "x")
    if op == "permute":
        ranks = jax.process_count()
        return c.permute(x, "x", [(rank, (rank + 1) % ranks) for rank in range(ranks)])
    return getattr(c, op)(x, "x")


def identities(payload: int) -> dict[str, float]:
    """One of IDENTITIES -> the largest difference between its two sides on this rank. payload: S in bytes."""
    rank, ranks = jax.process_index(), jax.process_count()

    def differences(x: jax.Array) -> jax.Array:
        index = jax.lax.axis_index("x")
        own = jnp.zeros((ranks, *x.shape), x.dtype).at[index].set(x).reshape(-1)
        blocks = c.all_gather(x, "x").reshape(ranks, ranks, -1)
        pairs = (
            (c.all_reduce(x, "x"), c.all_gather(c.reduce_scatter(x, "x"), "x")),
            (c.all_to_all(x, "x"), jnp.take(blocks.transpose(1, 0, 2), index, axis=0).reshape(-1)),
            (c.gather(x, 0, "x"), c.reduce(own, 0, "x")),
        )
        return jnp.stack([jnp.abs(one - other).max() for one, other in pairs])

    x = values(rank, 0, payload // 4)
    found = local(compiled(differences, x)(on_ranks(x)))
    return dict(zip(IDENTITIES, map(float, found), strict=True))


@functools.cache
def sharding() -> NamedSharding:
    """One block of dim 0 on the device of each process."""
    mesh = jax.make_mesh((jax.process_count(),), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices())
    return NamedSharding(mesh, P("x"))


def compiled(function: Callable[[jax.Array], jax.Array], own: np.ndarray) -> Any:
    """The function in shard_map over all ranks, compiled for blocks shaped as this rank's own."""
    mapped = jax.shard_map(function, mesh=sharding().mesh, in_specs=P("x"), out_specs=P("x"))
    like = jax.ShapeDtypeStruct((len(own) * jax.process_count(),), own.dtype, sharding=sharding())
    return jax.jit(mapped).lower(like).compile()


def on_ranks(own: np.ndarray) -> jax.Array:
    """The global array of which this rank holds `own`."""
    return jax.make_array_from_process_local_data(sharding(), own)


def local(x: jax.Array) -> np.ndarray:
    """This rank's block."""
    return np.asarray(x.addressable_shards[0].data)
