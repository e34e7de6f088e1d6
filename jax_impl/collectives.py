"""The eight collectives over a mesh axis, for use inside shard_map: what each is in jax.lax.

The pictures show ranks 0 and 1 before and after. `A0 A1` are the two blocks of rank 0's array along `dim`, `+` is the
elementwise sum, `.` is nothing. S is the payload in bytes as nccl-tests counts it, and wire is what a rank must send.

SPMD has no root: all ranks run one program and hold arrays of one shape. The four rooted collectives are therefore
written with rootless ones, whose larger cost is given. Ranks other than the root get zeros where they get nothing.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def broadcast(x: Array, root: int, axis: str) -> Array:
    """Everyone gets the root's array, as an all_reduce of it and of zeros. S = x, wire 2 (n-1)/n S.

    rank 0: A      =>  A
    rank 1: .      =>  A
    """
    return lax.psum(jnp.where(lax.axis_index(axis) == root, x, jnp.zeros_like(x)), axis)


def scatter(x: Array, root: int, axis: str) -> Array:
    """Rank r gets block r of the root's array, as a reduce_scatter of it and of zeros. S = x, wire (n-1)/n S.

    rank 0: A0 A1  =>  A0
    rank 1: .      =>  A1
    """
    return reduce_scatter(jnp.where(lax.axis_index(axis) == root, x, jnp.zeros_like(x)), axis)


def gather(x: Array, root: int, axis: str) -> Array:
    """The root gets every rank's array, concatenated, as an all_gather. S = the result, wire (n-1)/n S.

    rank 0: A      =>  A B
    rank 1: B      =>  . .
    """
    every = all_gather(x, axis)
    return jnp.where(lax.axis_index(axis) == root, every, jnp.zeros_like(every))


def reduce(x: Array, root: int, axis: str) -> Array:
    """The root gets the sum, as an all_reduce. S = x, wire 2 (n-1)/n S.

    rank 0: A      =>  A+B
    rank 1: B      =>  .
    """
    total = lax.psum(x, axis)
    return jnp.where(lax.axis_index(axis) == root, total, jnp.zeros_like(total))


def all_gather(x: Array, axis: str, dim: int = 0) -> Array:
    """Everyone gets every rank's array, concatenated along `dim`. S = the result, wire (n-1)/n S.

    rank 0: A      =>  A B
    rank 1: B      =>  A B

    Its transpose is reduce_scatter: every rank used the whole, so their gradients are summed and the sum is split.
    """
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def reduce_scatter(x: Array, axis: str, dim: int = 0) -> Array:
    """Rank r gets block r of the sum; `dim` must divide by n. S = x, wire (n-1)/n S. Its transpose is all_gather.

    rank 0: A0 A1  =>  A0+B0
    rank 1: B0 B1  =>  A1+B1
    """
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def all_reduce(x: Array, axis: str) -> Array:
    """Everyone gets the sum. S = x, wire 2 (n-1)/n S. Megatron's g: its transpose is `varying`, which moves nothing.

    rank 0: A      =>  A+B
    rank 1: B      =>  A+B
    """
    return lax.psum(x, axis)


def all_to_all(x: Array, axis: str) -> Array:
    """Rank r gets block r of every rank's array: a transpose over ranks, and its own transpose. S = x, wire (n-1)/n S.

    rank 0: A0 A1  =>  A0 B0
    rank 1: B0 B1  =>  A1 B1
    """
    return lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)


def permute(x: Array, axis: str, edges: list[tuple[int, int]]) -> Array:
    """Rank t gets rank s's array for every edge (s, t). A rank that is no target gets zeros. S = x, wire S.

    rank 0: A      =>  .
    rank 1: B      =>  A        edges = [(0, 1)]
    """
    return lax.ppermute(x, axis, edges)


def shard(x: Array, axis: str) -> Array:
    """Rank r keeps block r of a replicated array, along dim 0. Moves nothing.

    rank 0: A0 A1  =>  A0
    rank 1: A0 A1  =>  A1
    """
    size = len(x) // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size)


def varying(x: Array, axis: str) -> Array:
    """Megatron's f: a replicated array that every rank uses differently. Moves nothing; its transpose is all_reduce."""
    return lax.pcast(x, axis, to="varying")


def all_to_all_dims(x: Array, axis: str, split: int, concat: int) -> Array:
    """Rank r gets block r of dim `split` of every rank's array, concatenated along dim `concat`.

    Its transpose is the way back.
    """
    return lax.all_to_all(x, axis, split_axis=split, concat_axis=concat, tiled=True)
