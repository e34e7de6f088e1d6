"""Pipeline parallel: the layers split into stages over `pp`, the batch into microbatches, run in a schedule's order.

Forward: in every tick each stage computes, and what it computed is permuted to the next stage. Backward, derived: the
permutes reversed, in the opposite order, which is GPipe's. (B / m) D e bytes for each of m microbatches and n - 1
boundaries, each way (Huang et al., 1811.06965). The loss is the last stage's, told to all by one scalar psum. All ranks
run one program, so a stage computes in bubble ticks too, on values that nobody uses; but only edges that carry a
microbatch are in a tick's permute. What a stage does when is data: `contract.schedule`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from contract.problem import Batch
from contract.schedule import gpipe
from jax_impl.collectives import all_reduce, permute

AXIS = "pp"
STACKED = True  # a stage's layers, whole: W[1, D, F], b[1, F] of the stacks W[n_pp, D, F], b[n_pp, F]


def execute(
    forward: Callable[[Array], Array], loss: Callable[[Array, Batch], Array], batch: Batch, stages: int
) -> Array:
    """All microbatches X[m, b, D] through all stages: this stage's share of the loss, the last stage's alone.

    forward: of one microbatch through this stage, X[b, D] -> Y[b, D], both as the targets are laid out.
    """
    stage, last, microbatches = lax.axis_index(AXIS), stages - 1, len(batch.x)
    received, share = jnp.zeros_like(batch.x[0]), jnp.zeros((), batch.weight.dtype)
    for row in [row for row in gpipe(stages, microbatches) if any(a and a.kind == "forward" for a in row)]:
        x = jnp.where(stage == 0, batch.x[row[0].microbatch], received) if row[0] else received
        out = forward(x)
        if row[last]:
            error = loss(out, Batch(*(a[row[last].microbatch] for a in batch)))
            share += jnp.where(stage == last, error, 0)
        edges = [(s, s + 1) for s in range(last) if row[s]]
        received = permute(out, AXIS, edges) if edges else received
    return share


def total(share: Array) -> Array:
    """The last stage's loss, to all stages. The others' shares are zero."""
    return all_reduce(share, AXIS)
