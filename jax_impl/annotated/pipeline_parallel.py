"""Pipeline parallel: the layers split into stages over `pp`, the batch into microbatches, run in GPipe's order.

No collective is written. The stages are stacked on a split dim, and so is the buffer of what each is working on; in
every tick all stages compute at once (vmap) and the buffer is shifted by one stage, which XLA turns into a permute
(GSPMD, 2105.04663, section 3.3). The ticks are a loop, m + n - 1 long, that permutes in bubble ticks too.
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
    """All microbatches X[m, b, D] through all stages: the loss.

    forward: of what all stages work on, X[n_pp, b, D] -> Y[n_pp, b, D]. constrain: states how such a buffer is split.
    """
    bubble = ((0, stages - 1), (0, 0), (0, 0))
    inputs = jnp.pad(batch.x, bubble)  # [ticks, b, D]: no more input in the last n - 1 ticks,
    targets = Batch(*(jnp.pad(a, (bubble[0][::-1], *bubble[1:])) for a in batch))  # no output in the first

    def tick(state: Array, at_tick: tuple[Array, Batch]) -> tuple[Array, Array]:
        x, target = at_tick
        # X[n_pp, b, D]: stage s gets what stage s - 1 computed. Not jnp.roll, whose permute would close the ring.
        state = jnp.pad(state[:-1], ((1, 0), (0, 0), (0, 0))).at[0].set(x)
        state = constrain(forward(state))
        return state, jax.vmap(loss, (0, None))(state, target)  # every stage's, L[n_pp]

    state = jnp.zeros((stages, *inputs.shape[1:]), inputs.dtype)
    _, errors = lax.scan(tick, constrain(state), (inputs, targets))
    return jnp.sum(errors * (jnp.arange(stages) == stages - 1))  # the last stage's; errors[-1] would move the others'
