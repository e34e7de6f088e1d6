"""What the JAX ranks of `shardiff bench steps` do: shard_map, annotated and plain jit take turns step by step.

Exposed communication is read off jax's profiler, in steps of their own after the timed ones: the time in which a
collective runs on a rank and no operation computes. Its share of the profiled step is applied to the timed one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import profile_jax
from benchmarks.barrier_jax import barrier
from benchmarks.steps.numbers import WARM_UP, run_of
from contract.problem import Batch, Problem
from contract.strategy import Run
from contract.transformer import EPSILON, Transformer
from jax_impl import train
from jax_impl.compose import loss_and_grads
from jax_impl.mesh import make_mesh
from shardiff import hlo
from shardiff.hlo.work import work


@dataclass
class Contestant:
    """A compiled step and what it works on. step: (params, state, batch) -> (loss, grads, params, state)."""

    step: Any
    params: Any
    state: Any
    batch: Any
    grads: Any = None
    loss: Any = None

    def run(self) -> None:
        """One step, waited for."""
        self.loss, self.grads, self.params, self.state = self.step(self.params, self.state, self.batch)
        jax.block_until_ready((self.loss, self.grads, self.params, self.state))


@dataclass
class State:
    """A rank's contestants by name, and a barrier among the ranks."""

    contestants: dict[str, Contestant] = field(default_factory=dict)
    barrier: Any = None


def prepare(state: State, run: Run, names: list[str]) -> dict[str, str]:
    """Compile the contestants `names` of one strategy: "shard_map", "annotated block", "jit". All can take part."""
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_enable_x64", run.problem.dtype == "float64")
    state.contestants.clear()
    state.barrier = barrier(jax.devices()[: run.world_size])
    for name in names:
        state.contestants[name] = plain_jit(run) if name == "jit" else sharded(run_of(run, name))
    return {}


def prove(state: State) -> dict[str, float]:
    """One step of each contestant before any is timed: the distance of its gradients to those of the first."""
    for contestant in state.contestants.values():
        contestant.run()
    first, *_ = state.contestants.values()
    return {name: distance(one.grads, first.grads) for name, one in state.contestants.items()}


def sharded(run: Run) -> Contestant:
    """A strategy as `jax_impl.train` runs it."""
    mesh = make_mesh(run, jax.devices()[: run.world_size])
    params = train.make_params(mesh, run)
    optimizer = train.make_optimizer(run)
    batch = train.make_batch(mesh, run, 0)
    state = jax.jit(optimizer.init, out_shardings=train.state_shardings(optimizer, params, mesh, run))(params)
    step: Any = train.compile_step(mesh, run, optimizer, params)
    return Contestant(step.lower(params, state, batch).compile(), params, state, batch)


def plain_jit(run: Run) -> Contestant:
    """What a user of one device writes: no mesh, no sharding, nothing of ours but the initial numbers."""
    optimizer = train.make_optimizer(run)

    forward = plain_model(run.problem)

    def loss_of(params: list[Any], batch: Batch) -> jax.Array:
        out = forward(params, batch.x)
        return jnp.sum(batch.weight * jnp.square((out - batch.y).astype(batch.weight.dtype)))

    def step(params: list[Any], state: Any, batch: Batch) -> tuple[Any, Any, Any, Any]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return loss, grads, optax.apply_updates(params, updates), state

    mesh = make_mesh(run, jax.devices()[:1])
    plain = replace(run, implementation="shard_map")
    params, batch = train.make_params(mesh, plain), train.make_batch(mesh, plain, 0)
    state = jax.jit(optimizer.init)(params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()
    return Contestant(compiled, params, state, batch)


def plain_model(problem: Problem) -> Callable[[list[Any], jax.Array], jax.Array]:
    """The MLP, or the transformer without experts, as a user of one device writes it, from what jax.nn has."""

    def mlp(params: list[Any], x: jax.Array) -> jax.Array:
        for w, b in params:
            x = jax.nn.gelu(x @ w + b, approximate=False)
        return x

    def normalized(x: jax.Array, gain: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + EPSILON) * gain

    def transformer(params: list[Any], x: jax.Array) -> jax.Array:
        assert isinstance(problem, Transformer)
        for attention, mlp in zip(params[::2], params[1::2], strict=True):
            h = normalized(x, attention.gain)
            q, k, v = (
                (h @ w).reshape(*h.shape[:2], problem.heads, -1) for w in (attention.q, attention.k, attention.v)
            )
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + out.reshape(x.shape) @ attention.o
            h = normalized(x, mlp.gain)
            x = x + jax.nn.gelu(h @ mlp.up, approximate=False) @ mlp.down
        return x

    return transformer if isinstance(problem, Transformer) else mlp


def block(state: State, iterations: int, warmup: int) -> dict[str, dict[str, list[float]]]:
    """name -> {"step"} -> seconds of each iteration, taken in turn; every other iteration in the opposite order."""
    taken: dict[str, dict[str, list[float]]] = {name: {"step": []} for name in state.contestants}
    order = list(state.contestants.items())
    for iteration in range(warmup + iterations):
        for name, contestant in reversed(order) if iteration % 2 else order:
            state.barrier()
            start = time.perf_counter()
            contestant.run()
            if iteration >= warmup:
                taken[name]["step"].append(time.perf_counter() - start)
    return taken


def finish(state: State, profiled: int) -> dict[str, dict[str, Any]]:
    """For each contestant: the last loss; the distance of its parameters to the first contestant's; bytes held; bytes
    that the compiler plans for temporaries; the compiled program's records, and its work beside them; and of `profiled`
    steps the seconds and those of exposed communication."""
    results: dict[str, dict[str, Any]] = {}
    first = next(iter(state.contestants.values())).params
    for name, contestant in state.contestants.items():
        results[name] = {"loss": float(contestant.loss), "difference": distance(contestant.params, first)}
    for name, contestant in state.contestants.items():
        text, plan = contestant.step.as_text(), contestant.step.memory_analysis()

        def act(contestant: Contestant = contestant) -> None:
            state.barrier()
            contestant.run()

        records = hlo.read(text).records
        steps = profile_jax.profile(act, text, profiled) if records else []
        spans = [(ops, ops[0].start, max(o.end for o in ops)) for _, _, ops in steps if ops]
        results[name] |= {
            "parameters": held(contestant.params),
            "gradients": held(contestant.grads),
            "optimizer_state": held(contestant.state),
            "temporaries": plan.temp_size_in_bytes if plan else None,
            "records": [record.to_json() for record in records],
            "work": asdict(work(text)),
            "profiled": [(end - start) / 1e9 for _, start, end in spans],
            "exposed": [profile_jax.exposed(ops) / 1e9 for ops, _, _ in spans],
        }
    return results


def held(tree: Any) -> int:
    """Bytes that this rank holds of arrays."""
    return sum(shard.data.nbytes for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)


def distance(these: Any, those: Any) -> float:
    """||a - b|| / ||b|| over this rank's shards, in float64."""
    pairs = [
        (np.asarray(a.addressable_shards[0].data, np.float64), np.asarray(b.addressable_shards[0].data, np.float64))
        for a, b in zip(jax.tree.leaves(these), jax.tree.leaves(those), strict=True)
    ]
    return float(np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs) / sum(np.sum(b**2) for _, b in pairs)))


def speed(state: State, run: Run, iterations: int) -> dict[str, list[float]]:
    """Seconds of each iteration, taken in turn on one device: the three matrix products of each W[D, F] of a layer, or
    of a block, alone, X @ W, X^T @ dY and dY @ W^T; forward and backward pass of single_device; the optimizer's update;
    a copy of an array of the parameters' size."""
    jax.config.update("jax_default_matmul_precision", "highest")
    mesh = make_mesh(run, jax.devices()[:1])
    params, batch = train.make_params(mesh, run), train.make_batch(mesh, run, 0)
    optimizer = train.make_optimizer(run)
    optimizer_state = jax.jit(optimizer.init)(params)
    flat = jnp.concatenate([jnp.ravel(p) for layer in params for p in layer])

    matrices = [p.copy() for layer in params[: run.problem.unit] for p in layer if p.ndim == 2]  # params are donated
    rows, keys = batch.x[..., 0].size, iter(jax.random.split(jax.random.key(0), 2 * len(matrices)))
    operands = [(w, *(jax.random.normal(next(keys), (rows, size), w.dtype) for size in w.shape)) for w in matrices]

    @jax.jit
    def products(operands: list[tuple[jax.Array, ...]]) -> list[tuple[jax.Array, ...]]:
        return [(x @ w, x.T @ dy, dy @ w.T) for w, x, dy in operands]

    @jax.jit
    def passes(params: Any, batch: Any) -> Any:
        return loss_and_grads(params, batch, mesh, run)

    def apply(grads: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    update, copy = jax.jit(apply, donate_argnums=(1, 2)), jax.jit(lambda x: x.copy())
    taken: dict[str, list[float]] = {"matmul": [], "forward_backward": [], "update": [], "copy": []}
    warmup = min(WARM_UP, iterations)
    for iteration in range(warmup + iterations):
        at = [time.perf_counter()]
        jax.block_until_ready(products(operands))
        at.append(time.perf_counter())
        _, grads = jax.block_until_ready(passes(params, batch))
        at.append(time.perf_counter())
        params, optimizer_state = jax.block_until_ready(update(grads, optimizer_state, params))
        at.append(time.perf_counter())
        jax.block_until_ready(copy(flat))
        at.append(time.perf_counter())
        if iteration >= warmup:
            for name, start, end in zip(taken, at, at[1:], strict=False):
                taken[name].append(end - start)
    return taken
