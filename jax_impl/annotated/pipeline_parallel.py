"""Pipeline parallel: the layers split into stages over `pp`, the batch into microbatches, run in GPipe's order.

No collective is written. The stages are stacked on a split dim, and so is the buffer of what each is working on; in
every tick all stages compute at once (vmap) and the buffer is shifted by one stage, which XLA turns into a permute
(GSPMD, 2105.04663, section 3.3). The ticks are a loop, m + n - 1 long, that permutes in bubble ticks too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from contract.problem import Batch, Layer, pad_batch
from contract.strategy import Run
from jax_impl.model import MLP, annotations, is_layer, place, split_microbatches, squared_error, stack_stages

AXIS = "pp"
RULES = {"stage": AXIS}


def split_params(params: list[Layer], mesh: Mesh, run: Run) -> list[Layer]:
    """A stage's layers, whole: W[1, D, F], b[1, F] of the stacks W[n_pp, D, F], b[n_pp, F]."""
    stacked = stack_stages(params, mesh.size)
    return place(stacked, annotations(stacked, RULES), mesh)


def split_batch(batch: Batch, mesh: Mesh, run: Run) -> Batch:
    """The whole batch; only the first stage reads X[B, D], only the last one Y[B, D]. Microbatches of one size."""
    return place(pad_batch(batch, run.microbatches), P(), mesh)


def loss(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The mean squared error, a scalar."""
    stages, layer_exists = mesh.size, is_layer(run.problem.layers, mesh.size)
    microbatches = split_microbatches(batch, run.microbatches)
    bubble = ((0, stages - 1), (0, 0), (0, 0))
    inputs = jnp.pad(microbatches.x, bubble)  # [ticks, b, D]: no more input in the last n - 1 ticks,
    targets = Batch(*(jnp.pad(a, (bubble[0][::-1], *bubble[1:])) for a in microbatches))  # no output in the first
    split = NamedSharding(mesh, P(AXIS))

    def tick(state: Array, at_tick: tuple[Array, Batch]) -> tuple[Array, Array]:
        x, target = at_tick
        # X[n_pp, b, D]: stage s gets what stage s - 1 computed. Not jnp.roll, whose permute would close the ring.
        state = jnp.pad(state[:-1], ((1, 0), (0, 0), (0, 0))).at[0].set(x)
        state = lax.with_sharding_constraint(forward(params, state, layer_exists), split)
        return state, jax.vmap(squared_error, (0, None))(state, target)  # every stage's, L[n_pp]

    state = jnp.zeros((stages, *inputs.shape[1:]), inputs.dtype)
    _, errors = lax.scan(tick, lax.with_sharding_constraint(state, split), (inputs, targets))
    return jnp.sum(errors * (jnp.arange(stages) == stages - 1))  # the last stage's; errors[-1] would move the others'


def forward(params: list[Layer], state: Array, layer_exists: Array) -> Array:
    """Every stage's microbatch through that stage; `layer_exists` where stages differ in length."""
    if layer_exists.all():
        return jax.vmap(lambda stage, x: MLP(stage)(x))(params, state)  # Y[n_pp, b, F] = X[n_pp, b, D] @ W[n_pp, D, F]
    for j, layer in enumerate(params):
        y = jax.vmap(lambda layer, x: MLP([layer])(x))(layer, state)
        state = jnp.where(layer_exists[:, j, None, None], y, state)
    return state


def loss_and_grads(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> tuple[Array, list[Layer]]:
    """The loss, and the gradients of a stage's layers."""
    return jax.value_and_grad(loss)(params, batch, mesh, run)
