"""Pipeline parallel: the layers split into stages over `pp`, the batch into microbatches, run in GPipe's order.

Forward: in every tick each stage computes, and what it computed is permuted to the next stage. Backward, derived: the
permutes reversed, in the opposite order, which is GPipe's. (B / m) D e bytes for each of m microbatches and n - 1
boundaries, each way (Huang et al., 1811.06965). The loss is the last stage's, told to all by one scalar psum. All ranks
run one program, so a stage computes in bubble ticks too, on values that nobody uses; but only edges that carry a
microbatch are in a tick's permute. What a stage does when is data: `contract.schedule`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from contract.problem import Batch, Layer, pad_batch
from contract.schedule import gpipe
from contract.strategy import Run
from jax_impl.collectives import all_reduce, permute
from jax_impl.model import gelu, is_layer, place, split_microbatches, squared_error, stack_stages

AXIS = "pp"


def split_params(params: list[Layer], mesh: Mesh, run: Run) -> list[Layer]:
    """A stage's layers, whole: W[1, D, F], b[1, F] of the stacks W[n_pp, D, F], b[n_pp, F]."""
    return place(stack_stages(params, mesh.size), P(AXIS), mesh)


def split_batch(batch: Batch, mesh: Mesh, run: Run) -> Batch:
    """The whole batch; only the first stage reads X[B, D], only the last one Y[B, D]. Microbatches of one size."""
    return place(pad_batch(batch, run.microbatches), P(), mesh)


def loss(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The mean squared error, a scalar, the same on every rank."""
    last, layer_exists = mesh.size - 1, is_layer(run.problem.layers, mesh.size)
    ticks = [row for row in gpipe(mesh.size, run.microbatches) if any(a and a.kind == "forward" for a in row)]

    @jax.shard_map(mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P())
    def per_stage(params: list[Layer], batch: Batch) -> Array:
        stage, microbatches = lax.axis_index(AXIS), split_microbatches(batch, run.microbatches)
        layers = [Layer(w[0], b[0]) for w, b in params]
        received = jnp.zeros_like(microbatches.x[0])
        total = jnp.zeros((), batch.weight.dtype)
        for row in ticks:
            x = jnp.where(stage == 0, microbatches.x[row[0].microbatch], received) if row[0] else received
            out = forward(layers, x, jnp.asarray(layer_exists)[stage] if not layer_exists.all() else None)
            if row[last]:
                error = squared_error(out, Batch(*(a[row[last].microbatch] for a in microbatches)))
                total += jnp.where(stage == last, error, 0)
            edges = [(s, s + 1) for s in range(last) if row[s]]
            received = permute(out, AXIS, edges) if edges else received
        return all_reduce(total, AXIS)

    return per_stage(params, batch)


def forward(params: list[Layer], x: Array, layer_exists: Array | None) -> Array:
    """One microbatch through one stage; `layer_exists` where stages differ in length."""
    for j, (w, b) in enumerate(params):
        y = gelu(x @ w + b)  # Y[B, F] = X[B, D] @ W[D, F]
        x = y if layer_exists is None else jnp.where(layer_exists[j], y, x)
    return x


def loss_and_grads(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> tuple[Array, list[Layer]]:
    """The loss, and the gradients of a stage's layers. The backward sends are the transposes of the forward ones."""
    return jax.value_and_grad(loss)(params, batch, mesh, run)
