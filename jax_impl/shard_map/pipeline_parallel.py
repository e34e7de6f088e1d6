"""Pipeline parallel: the layers are split into stages over `pp`, the batch into microbatches, in a schedule's order.

Forward: in every tick each stage computes, and its output is permuted to the stage with the next part. Backward, in
GPipe's order: derived, the same permutes reversed and in the opposite order. (B / m) D e bytes for each of m
microbatches and each boundary between parts, each way (Huang et al., 1811.06965). The last part has the loss, and one
scalar psum gives it to all. All ranks run one program, so in GPipe's order a stage computes in bubble ticks too, on
values that nobody uses, but the permute of a tick has only those edges that carry a microbatch.

No transpose gives another order, so there the backward passes are written: `jax_impl.ticks` differentiates each action
by itself and permutes the gradients. What a stage does when is data: `contract.schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax

from contract.problem import Batch, Layer
from contract.schedule import Schedule, gpipe
from contract.schedule_time import rows
from jax_impl import ticks
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
    for row in [row for row in rows(gpipe(stages, microbatches)) if any(a and a.kind == "forward" for a in row)]:
        x = jnp.where(stage == 0, batch.x[row[0].microbatch], received) if row[0] else received
        out = forward(x)
        if (done := row[last]) is not None:
            error = loss(out, Batch(*(a[done.microbatch] for a in batch)))
            share += jnp.where(stage == last, error, 0)
        edges = [(s, s + 1) for s in range(last) if row[s]]
        received = permute(out, AXIS, edges) if edges else received
    return share


def execute_with_grads(
    chunks: Sequence[ticks.Chunk], loss: Callable[[Array, Batch], Array], batch: Batch, schedule: Schedule
) -> tuple[Array, list[list[list[Layer]]]]:
    """The same in any order: the share of the loss, and the gradients of the layers of every chunk."""
    return ticks.execute(chunks, loss, batch, schedule, AXIS)


def total(share: Array) -> Array:
    """L = AllReduce_pp(L{U_pp}): the last part's loss, as the other stages' shares are zero."""
    return all_reduce(share, AXIS)
