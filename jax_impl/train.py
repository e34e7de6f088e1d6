"""Train with JAX, under shard_map or with annotations: `run(Run) -> RunResult`, and the step compiled for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from contract.layout import layout, merge
from contract.optimizer import SLOTS, AdamW, Sgd
from contract.problem import Batch
from contract.share import names
from contract.strategy import Run, RunResult, Shard
from jax_impl.compose import loss_and_grads
from jax_impl.mesh import make_mesh, shardings
from jax_impl.specs import load, params_specs, pipeline_of, positions_of, split_batch, split_params
from jax_impl.updates import state_shardings, update
from shardiff.ranks.jax_devices import devices

STATE_KEYS = {"momentum": "trace", "m": "mu", "v": "nu"}  # our slots -> optax's


def run(run: Run) -> RunResult:
    """Train `run` on this process's devices (which `jax_devices.prepare` has made) and gather the full arrays."""
    with jax.enable_x64(run.problem.dtype == "float64"), jax.default_matmul_precision("highest"):
        return train(run)


def train(run: Run) -> RunResult:
    """The training loop. The caller sets the precision."""
    mesh = make_mesh(run, devices(run.world_size, run.device))
    params = make_params(mesh, run)
    optimizer = make_optimizer(run)
    step = compile_step(mesh, run, optimizer, params)
    state = jax.jit(optimizer.init, out_shardings=state_shardings(optimizer, params, mesh, run))(params)

    losses, grad_norms, digests, first_grads = [], [], [shard_digests(params, mesh, run)], []
    for i in range(run.steps):
        loss, grads, params, state = step(params, state, make_batch(mesh, run, i))
        losses.append(float(loss))
        grads = to_numpy(grads, mesh, run, "gradients")
        grad_norms.append(np.sqrt(sum(np.sum(np.square(a, dtype=np.float64)) for layer in grads for a in layer)))
        if i == 0:
            first_grads = grads
        digests.append(shard_digests(params, mesh, run))
    return RunResult(
        losses=np.array(losses),
        grads=first_grads,
        grad_norms=np.array(grad_norms),
        params=to_numpy(params, mesh, run),
        optimizer_state={
            slot: to_numpy(optax.tree.get(state, STATE_KEYS[slot]), mesh, run, "optimizer_state")
            for slot in SLOTS[run.optimizer]
        },
        shards=shards(params, mesh, run, digests),
    )


def make_params(mesh: Mesh, run: Run) -> list[Any]:
    """The initial parameters on the devices of the mesh, split as the strategies say."""
    full = [layer._make(cast(a, run.problem.dtype) for a in layer) for layer in run.problem.parameters()]
    return split_params(full, mesh, run)


def make_batch(mesh: Mesh, run: Run, step: int) -> Batch:
    """A step's batch, split as the strategies say. The weights, and hence the loss, are in float32 at least."""
    x, y, weight = run.problem.data(step)
    dtype = run.problem.dtype
    full = Batch(cast(x, dtype), cast(y, dtype), cast(weight, "float64" if dtype == "float64" else "float32"))
    return split_batch(full, mesh, run)


def make_optimizer(run: Run) -> optax.GradientTransformation:
    """The optimizer of optax, with the hyperparameters of `contract.optimizer`."""
    if run.optimizer == "sgd":
        sgd = Sgd()
        return optax.sgd(sgd.lr, sgd.momentum)
    adamw = AdamW()
    return optax.adamw(adamw.lr, adamw.b1, adamw.b2, adamw.eps, weight_decay=adamw.weight_decay)


def make_step(
    mesh: Mesh, run: Run, optimizer: optax.GradientTransformation, with_grads: bool = True
) -> Callable[..., Any]:
    """One training step, not yet compiled: (params, state, batch) -> (loss, grads, params, state).

    with_grads: whether it returns the gradients, which XLA then has to make whole where ranks need only a part of them.
    """

    def step(params: list[Any], state: Any, batch: Batch) -> tuple[Any, ...]:
        loss, grads = loss_and_grads(params, batch, mesh, run)
        updated = update(optimizer, params, grads, state, mesh, run)
        return (loss, grads, *updated) if with_grads else (loss, *updated)

    return step


def compile_step(
    mesh: Mesh, run: Run, optimizer: optax.GradientTransformation, params: list[Any], with_grads: bool = True
) -> Callable[..., Any]:
    """The step under jit, with all shardings stated. Parameters and state are donated: their memory is reused."""
    of_params = jax.tree.map(lambda p: p.sharding, params)
    of_state = state_shardings(optimizer, params, mesh, run)
    of_grads = shardings(params_specs(run, "gradients"), mesh)
    of_batch = jax.tree.map(lambda a: a.sharding, make_batch(mesh, run, 0))
    return jax.jit(
        make_step(mesh, run, optimizer, with_grads),
        in_shardings=(of_params, of_state, of_batch),
        out_shardings=(NamedSharding(mesh, P()), *([of_grads] if with_grads else []), of_params, of_state),
        donate_argnums=(0, 1),
    )


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """A float64 array in `dtype`. It goes to bfloat16 by way of float32, as in torch."""
    return array.astype(np.float32).astype(jnp.bfloat16) if dtype == "bfloat16" else array.astype(dtype)


def local_layers(params: list[Any], mesh: Mesh, run: Run, rank: int) -> list[Any]:
    """What one rank holds, as NumPy arrays in the order of `contract.layout`, without what only pads a stack."""
    device, stacked = mesh.devices.flat[rank], pipeline_of(load(run)) is not None
    positions = positions_of(run, rank)

    def local(array: jax.Array) -> np.ndarray:
        shard = next(s for s in array.addressable_shards if s.device == device)
        data = np.asarray(shard.data)
        return data[0] if stacked else data

    return [params[position]._make(map(local, params[position])) for position in positions]


def to_numpy(params: list[Any], mesh: Mesh, run: Run, of: str = "parameters") -> list[Any]:
    """Full NumPy arrays from the shards. bfloat16 is widened to float32."""

    def widen(a: np.ndarray) -> np.ndarray:
        return a.astype(np.float32) if a.dtype == jnp.bfloat16 else a

    ranks = [local_layers(params, mesh, run, rank) for rank in range(run.world_size)]
    return merge(run, [[layer._make(map(widen, layer)) for layer in layers] for layers in ranks], of)


def shard_digests(params: list[Any], mesh: Mesh, run: Run) -> list[dict[str, str]]:
    """For each rank, parameter name -> digest of the bits of its shard."""
    return [
        {
            name: hashlib.blake2b(np.ascontiguousarray(a).view(np.uint8).data, digest_size=8).hexdigest()
            for part, layer in zip(parts, local_layers(params, mesh, run, rank), strict=True)
            for name, a in zip(names(part), layer, strict=True)
        }
        for rank, parts in enumerate(layout(run))
    ]


def shards(params: list[Any], mesh: Mesh, run: Run, digests: list[list[dict[str, str]]]) -> list[dict[str, Shard]]:
    """For each rank, parameter name -> Shard."""
    return [
        {
            name: Shard(a.shape, str(a.dtype), a.nbytes, tuple(step[rank][name] for step in digests))
            for part, layer in zip(parts, local_layers(params, mesh, run, rank), strict=True)
            for name, a in zip(names(part), layer, strict=True)
        }
        for rank, parts in enumerate(layout(run))
    ]
