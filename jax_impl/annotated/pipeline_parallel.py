"""Pipeline parallel: the layers are split into stages over `pp`, the batch into microbatches, in GPipe's order.

No collective is written. The stages are stacked along a split dim, and so is the buffer of what they work on. In every
tick all stages compute at once (vmap) and the buffer is shifted by one stage, which XLA turns into a permute (GSPMD,
2105.04663, section 3.3). The ticks are a loop of m + n - 1 trips, which permutes in bubble ticks too.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from contract.problem import Batch

AXIS = "pp"
RULES = {"stage": AXIS}  # a stage's layers, whole: W[1, D, F], b[1, F] of the stacks W[n_pp, D, F], b[n_pp, F]
STACKED = True


def execute(
    forward: Callable[[Array], Array],
    loss: Callable[[Array, Batch], Array],
    batch: Batch,
    stages: int,
    constrain: Callable[[Array], Array],
) -> Array:
    """Take all microbatches X[m, b, D] through all stages: the loss.

    forward: maps what all stages work on, X[n_pp, b, D], to Y[n_pp, b, D]. constrain: states how such an array is
    split.
    """
    rest = ((0, 0),) * (batch.x.ndim - 1)
    inputs = jnp.pad(batch.x, ((0, stages - 1), *rest))  # [ticks, b, D]: no input in the last n - 1 ticks,
    targets = Batch(*(jnp.pad(a, ((stages - 1, 0), *rest)) for a in batch))  # no output in the first

    def tick(state: Array, at_tick: tuple[Array, Batch]) -> tuple[Array, Array]:
        x, target = at_tick
        # X[n_pp, b, D]: stage s gets what stage s - 1 computed. The permute of jnp.roll would close the ring, and of a
        # slice and a concatenation XLA makes all_to_alls.
        state = lax.pad(state, jnp.zeros((), state.dtype), ((1, -1, 0), *[(0, 0, 0)] * len(rest))).at[0].set(x)
        state = constrain(forward(state))
        return state, jax.vmap(loss, (0, None))(state, target)  # every stage's, L[n_pp]

    state = jnp.zeros((stages, *inputs.shape[1:]), inputs.dtype)
    _, errors = lax.scan(tick, constrain(state), (inputs, targets))
    return jnp.sum(errors * (jnp.arange(stages) == stages - 1))  # of the last stage alone; indexing would communicate
