"""Pipeline parallel: the layers are split into stages over `pp`, the batch into microbatches, in a schedule's order.

Forward: in every tick each stage computes, and its output is permuted to the next stage. Backward, derived: the same
permutes reversed and in the opposite order, which is GPipe's. (B / m) D e bytes for each of m microbatches and n - 1
boundaries, each way (Huang et al., 1811.06965). The last stage has the loss, and one scalar psum gives it to all. All
ranks run one program, so a stage computes in bubble ticks too, on values that nobody uses, but the permute of a tick
has only those edges that carry a microbatch. What a stage does when is data: `contract.schedule`.
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
    """Take all microbatches X[m, b, D] through all stages: this stage's share of the loss, zero but on the last stage.

    forward: maps one microbatch X[b, D] to Y[b, D] through this stage; both are split as the targets are.
    """
    stage, last, microbatches = lax.axis_index(AXIS), stages - 1, len(batch.x)
    received, share = jnp.zeros_like(batch.x[0]), jnp.zeros((), batch.weight.dtype)
    for row in [row for row in gpipe(stages, microbatches) if any(a and a.kind == "forward" for a in row)]:
        x = jnp.where(stage == 0, batch.x[row[0].microbatch], received) if row[0] else received
        out = forward(x)
        if (done := row[last]) is not None:
            error = loss(out, Batch(*(a[done.microbatch] for a in batch)))
            share += jnp.where(stage == last, error, 0)
        edges = [(s, s + 1) for s in range(last) if row[s]]
        received = permute(out, AXIS, edges) if edges else received
    return share


def total(share: Array) -> Array:
    """L = AllReduce_pp(L{U_pp}): the last stage's loss, as the other stages' shares are zero."""
    return all_reduce(share, AXIS)
