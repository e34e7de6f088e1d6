"""One training step of several strategies, each on its own axis of the mesh. This module knows none of them by name.

It asks each strategy for the names in `contract.strategy`; a name that a strategy omits changes nothing. Under
shard_map, functions are chained; in annotated, the model is written for one device. The backward pass and the
synchronization of gradients follow: by transposition, or from what XLA derives. Only a pipeline in another order than
GPipe's, and gradients that are scattered after the backward pass, are written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from contract.layout import schedule_of, unit_of
from contract.problem import Batch
from contract.strategy import Run
from contract.transformer import Transformer
from jax_impl import model
from jax_impl.blocks import Blocks
from jax_impl.collectives import all_reduce, varying
from jax_impl.mesh import shardings
from jax_impl.model import is_layer, split_by, squared_error
from jax_impl.specs import Strategies, batch_specs, chain, load, merged_rules, module, params_specs, pipeline_of
from jax_impl.ticks import Chunk, named


def loss(params: list[Any], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The mean squared error over all samples: a scalar, the same on every rank."""
    if run.implementation == "annotated":
        return annotated(params, batch, mesh, run)
    if not run.in_gpipes_order:
        return loss_and_grads(params, batch, mesh, run)[0]
    specs = (params_specs(run), batch_specs(run))
    of_rank = jax.shard_map(lambda p, b: share_of_rank(p, b, mesh, run), mesh=mesh, in_specs=specs, out_specs=P())
    return of_rank(params, batch)


def loss_and_grads(params: list[Any], batch: Batch, mesh: Mesh, run: Run) -> tuple[Array, list[Any]]:
    """The loss, and the gradients as a rank holds them."""
    specs = params_specs(run, "gradients")
    if run.implementation == "annotated":
        value, grads = jax.value_and_grad(annotated)(params, batch, mesh, run)
        return value, constrained(grads, specs, mesh) if specs != params_specs(run) else grads

    @jax.shard_map(mesh=mesh, in_specs=(params_specs(run), batch_specs(run)), out_specs=(P(), specs))
    def of_rank(params: list[Any], batch: Batch) -> tuple[Array, list[Any]]:
        strategies = load(run)
        scatters = [s for s in strategies if hasattr(s, "gradients")]
        replicates = [s for s in strategies if scatters and getattr(s, "REPLICATED", False)]
        for strategy in (*scatters, *replicates):  # so that no sum is derived: gradients are this rank's part of it
            params = jax.tree.map(lambda p, axis=strategy.AXIS: varying(p, axis), params)
        passes = jax.value_and_grad(share_of_rank) if run.in_gpipes_order else share_and_grads_of_rank
        value, grads = passes(params, batch, mesh, run, replicates)
        with jax.named_scope("gradients"):
            grads = map_layers(lambda layer: chain(scatters, "gradients", layer), grads, run)
            for strategy in replicates:  # only the shards are summed over replicas
                grads = jax.tree.map(lambda g, axis=strategy.AXIS: all_reduce(g, axis), grads)
        return value, grads

    return of_rank(params, batch)


def model_of(strategies: Strategies, run: Run) -> Callable[..., Array]:
    """The function of (layers, x) that computes the model, with what the strategies communicate inside it."""
    if isinstance(run.problem, Transformer):
        return Blocks(run.problem, tuple(strategies), run.recompute)
    return next((s.forward for s in strategies if hasattr(s, "forward")), model.forward)


def map_layers(f: Callable[[Any], Any], layers: list[Any], run: Run) -> list[Any]:
    """Apply a function to every layer of a rank. In a pipeline a layer has a dim of one stage in front."""
    if pipeline_of(load(run)) is None:
        return [f(layer) for layer in layers]
    return [layer._make(a[None] for a in f(layer._make(a[0] for a in layer))) for layer in layers]


def share_of_rank(params: list[Any], batch: Batch, mesh: Mesh, run: Run, skip: Strategies = ()) -> Array:
    """The loss, inside shard_map: the same on every rank. skip: whose `weights` are not used."""
    strategies = load(run)
    used = functools.partial(chain, [s for s in strategies if s not in skip], "weights")
    forward = model_of(strategies, run)
    if (pipeline := pipeline_of(strategies)) is None:
        out = through(lambda layers, x: forward(map(used, layers), x), params, batch.x, run)
        return chain(strategies, "total", squared_error(out, batch))
    layers = [used(layer._make(a[0] for a in layer)) for layer in params]
    stages = mesh.shape[pipeline.AXIS]
    stage = functools.partial(stage_of(forward, lax.axis_index(pipeline.AXIS), run), layers)
    return chain(strategies, "total", pipeline.execute(stage, squared_error, batch, stages))


def through(forward: Callable[..., Array], params: list[Any], x: Array, run: Run) -> Array:
    """All layers. Those that are run or gathered again in the backward pass: as many at a time as stay together."""
    if run.recompute == "block":
        again = jax.checkpoint(forward)
    elif run.gathered_again and run.spelling != "naive":
        again = jax.checkpoint(forward, policy=next(s.kept for s in load(run) if hasattr(s, "kept")))
    else:
        return forward(params, x)
    for i in range(0, len(params), unit_of(run)):
        x = again(params[i : i + unit_of(run)], x)
    return x


def share_and_grads_of_rank(
    params: list[Any], batch: Batch, mesh: Mesh, run: Run, skip: Strategies = ()
) -> tuple[Array, list[Any]]:
    """The loss and the gradients of a pipeline in any order, inside shard_map. Its backward passes are written."""
    strategies, schedule = load(run), schedule_of(run)
    forward = model_of(strategies, run)
    pipeline = pipeline_of(strategies)
    assert schedule is not None and pipeline is not None

    def used(params: list[Any]) -> list[Any]:
        using = [s for s in strategies if s not in skip]
        return [chain(using, "weights", layer._make(a[0] for a in layer)) for layer in params]

    layers, back = jax.vjp(used, params)
    stage, size = lax.axis_index(pipeline.AXIS), len(layers) // schedule.chunks
    step = unit_of(run) if schedule.split else size  # where W is put off, so is each unit's by itself
    chunks = []
    for chunk in range(schedule.chunks):
        starts = range(0, size, step)
        functions = [stage_of(forward, stage, run, chunk, start) for start in starts]
        chunks.append(Chunk(functions, [layers[chunk * size + s : chunk * size + s + step] for s in starts]))
    share, grads = pipeline.execute_with_grads(chunks, squared_error, batch, schedule)
    (whole,) = back([layer for chunk in grads for function in chunk for layer in function])
    with named("forward"):
        return chain(strategies, "total", share), whole


def stage_of(
    forward: Callable[..., Array], stage: Array, run: Run, chunk: int = 0, start: int = 0
) -> Callable[[list[Any], Array], Array]:
    """What takes one microbatch through layers of a stage's chunk, from number `start` on, without those that only pad
    the stack: (layers, x) -> y."""
    schedule, unit = schedule_of(run), unit_of(run)
    assert schedule is not None
    exists = is_layer(run.problem.depth // unit, schedule.parts)

    def apply(layers: list[Any], x: Array) -> Array:
        if exists.all():
            return through(forward, layers, x, run)
        for j in range(0, len(layers), unit):
            there = jnp.asarray(exists)[stage, chunk, (start + j) // unit]
            x = jnp.where(there, through(forward, layers[j : j + unit], x, run), x)
        return x

    return apply


def annotated(params: list[Any], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The loss of the model as one device would compute it. Everything else follows from how arrays are split."""
    strategies, rules = load(run), merged_rules(load(run))
    every = run.spelling == "best" and any(getattr(s, "ACTIVATIONS", False) for s in strategies)
    some = {dim for s in strategies for dim in getattr(s, "NAIVE", ())} if run.spelling == "naive" else set[str]()
    whole = run.spelling == "best" and any(getattr(s, "WHOLE", False) for s in strategies)
    in_use = merged_rules([s for s in strategies if not getattr(s, "WHOLE", False)])

    def as_stated(x: Array, *dims: Any, weight: str | None = None) -> Array:
        spec = P(*(split_by(in_use if weight == "used" else rules, names) for names in dims))
        named = {name for names in dims for name in ((names,) if isinstance(names, str) else names or ())}
        # Where a matrix is kept whole, nothing comes between its two uses, and it is gathered for both at once.
        stated = whole and (weight == "used" or run.gathered_again) if weight else every or some & named
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) if stated else x

    def layers_of(params: list[Any], x: Array) -> Array:
        return module(params, run)(x, as_stated)

    if (pipeline := pipeline_of(strategies)) is None:
        return squared_error(through(layers_of, params, batch.x, run), batch)
    stages = mesh.shape[pipeline.AXIS]
    schedule = schedule_of(run)
    assert schedule is not None
    exists = jnp.asarray(is_layer(run.problem.depth // unit_of(run), schedule.parts)[:, 0].repeat(unit_of(run), axis=1))
    split = NamedSharding(mesh, P(pipeline.AXIS, *batch_specs(run).x[1:]))

    def stage(state: Array) -> Array:
        """Each stage takes its microbatch through its layers: Y[n_pp, b, F] = X[n_pp, b, D] @ W[n_pp, D, F]."""
        if run.problem.depth % (stages * unit_of(run)) == 0:
            every = functools.partial(through, layers_of, run=run)
            return jax.vmap(every, spmd_axis_name=pipeline.AXIS)(params, state)
        for j, layer in enumerate(params):
            y = jax.vmap(lambda layer, x: through(layers_of, [layer], x, run), spmd_axis_name=pipeline.AXIS)(
                layer, state
            )
            state = jnp.where(exists[:, j].reshape(-1, *[1] * (y.ndim - 1)), y, state)
        return state

    constrain = functools.partial(lax.with_sharding_constraint, shardings=split)
    return pipeline.execute(stage, squared_error, batch, stages, constrain)


def constrained(layers: list[Any], specs: list[Any], mesh: Mesh) -> list[Any]:
    """Layers that are split as these PartitionSpecs say."""
    return lax.with_sharding_constraint(layers, shardings(specs, mesh))
