"""One training step of several strategies, each on its own axis of the mesh. This module knows none of them by name.

It asks each strategy for the names in `contract.strategy`; a name that a strategy omits changes nothing. Under
shard_map, specs are joined dim by dim and functions are chained, the innermost strategy first. In annotated, rules are
merged. The backward pass and the synchronization of gradients follow: by transposition, or from what XLA derives.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from contract.layout import batch_shares, chunks_of, padded_rows, schedule_of, unit_of
from contract.problem import Batch, Layer, pad_batch, split_microbatches
from contract.strategy import Run
from jax_impl import model
from jax_impl.mesh import place
from jax_impl.model import MLP, annotation_specs, batch_annotations, is_layer, squared_error, stack_stages
from jax_impl.ticks import Chunk, named

Strategies = Sequence[Any]  # modules, outermost first
Rules = dict[str, str | tuple[str, ...]]  # logical axis -> mesh axes


def load(run: Run) -> Strategies:
    """The modules of a run's strategies."""
    return [importlib.import_module(f"jax_impl.{run.implementation}.{name}") for name in run.strategies]


def chain(strategies: Strategies, name: str, value: Any) -> Any:
    """Pass `value` through the function `name` of every strategy that has it, the innermost first."""
    for strategy in reversed(strategies):
        if hasattr(strategy, name):
            value = getattr(strategy, name)(value)
    return value


def pipeline_of(strategies: Strategies) -> Any | None:
    """The one strategy that has an order of execution of its own, if there is one."""
    return next((s for s in strategies if hasattr(s, "execute")), None)


def split_params(params: list[Layer], mesh: Mesh, run: Run) -> list[Layer]:
    """The full parameters on the devices of the mesh; with a pipeline, stacked over its stages."""
    if (schedule := schedule_of(run)) is not None:
        params = stack_stages(params, schedule.parts, unit_of(run))
    return place(params, params_specs(run), mesh)


def split_batch(batch: Batch, mesh: Mesh, run: Run) -> Batch:
    """The global batch on the devices of the mesh, padded to shares of one size: X[B, D], or X[m, b, D]."""
    shares = batch_shares(run)
    if pipeline_of(load(run)) is not None:
        return place(split_microbatches(batch, shares, run.microbatches), batch_specs(run), mesh)
    return place(pad_batch(batch, shares), batch_specs(run), mesh)


def params_specs(run: Run) -> list[Layer]:
    """The PartitionSpec of every parameter."""
    strategies, (layers, stages) = load(run), stack_shape(run)
    if run.implementation == "annotated":
        return annotation_specs(layers, merged_rules(strategies), stages)
    specs = [Layer(P(), P())] * layers
    for strategy in reversed(strategies):
        if (mine := getattr(strategy, "PARAMS_SPEC", None)) is not None:
            specs = [Layer(*map(join, a, mine[i % len(mine)])) for i, a in enumerate(specs)]
    if (pipeline := pipeline_of(strategies)) is not None:
        specs = [Layer(*(P(pipeline.AXIS, *spec) for spec in layer)) for layer in specs]
    return specs


def stack_shape(run: Run) -> tuple[int, int | None]:
    """The number of layers per rank, and of the stages over which each is stacked; None without a pipeline."""
    if (schedule := schedule_of(run)) is None:
        return run.problem.layers, None
    unit = unit_of(run)
    return schedule.chunks * -(-(run.problem.layers // unit) // len(schedule.parts)) * unit, schedule.stages


def positions_of(run: Run, rank: int) -> list[int]:
    """Which of the layers that a rank's program has are layers of the model, and do not only pad the stack."""
    layers, _ = stack_shape(run)
    chunks = chunks_of(run, rank)
    longest = layers // len(chunks)
    return [number * longest + j for number, chunk in enumerate(chunks) for j in range(len(chunk))]


def batch_specs(run: Run) -> Batch:
    """The PartitionSpecs of x, y and weight. In a pipeline x is split as y is, because stages pass it on so."""
    strategies = load(run)
    if run.implementation == "annotated":
        specs = batch_annotations(merged_rules(strategies))
    else:
        specs = Batch(P(), P(), P())
        for strategy in reversed(strategies):
            if (mine := getattr(strategy, "BATCH_SPEC", None)) is not None:
                specs = Batch(*map(join, specs, mine))
    return Batch(*(P(None, *s) for s in specs._replace(x=specs.y))) if pipeline_of(strategies) else specs


def join(inner: P, outer: P) -> P:
    """Two specs of one array as one: the inner strategy cuts first, and the outer one cuts its parts."""

    def names(entry: Any) -> tuple[str, ...]:
        return () if entry is None else entry if isinstance(entry, tuple) else (entry,)

    length = max(len(inner), len(outer))
    dims = [
        names(a) + names(b)
        for a, b in zip(*((*spec, *[None] * (length - len(spec))) for spec in (inner, outer)), strict=True)
    ]
    return P(*(dim[0] if len(dim) == 1 else dim or None for dim in dims))


def merged_rules(strategies: Strategies) -> Rules:
    """The rules of all strategies as one dict. Where two split one dim, the outer one cuts the inner one's parts."""
    rules: Rules = {}
    for strategy in reversed(strategies):
        for logical, axis in strategy.RULES.items():
            before = rules.get(logical, ())
            before = before if isinstance(before, tuple) else (before,)
            rules[logical] = (*before, axis) if before else axis
    return rules


def loss(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The mean squared error over all samples: a scalar, the same on every rank."""
    if run.implementation == "annotated":
        return annotated(params, batch, mesh, run)
    if pipeline_of(load(run)) is not None and not run.in_gpipes_order:
        return per_rank_with_grads(params, batch, mesh, run)[0]
    return per_rank(params, batch, mesh, run)


def loss_and_grads(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> tuple[Array, list[Layer]]:
    """The loss, and the gradients, split as the parameters are. The backward communication is derived; that of a
    pipeline in another order than GPipe's is written."""
    if pipeline_of(load(run)) is not None and not run.in_gpipes_order:
        return per_rank_with_grads(params, batch, mesh, run)
    return jax.value_and_grad(loss)(params, batch, mesh, run)


def per_rank(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The loss as every rank computes it on its shards, with the collectives that the strategies write."""
    strategies = load(run)
    forward = next((s.forward for s in strategies if hasattr(s, "forward")), model.forward)
    pipeline = pipeline_of(strategies)

    @jax.shard_map(mesh=mesh, in_specs=(params_specs(run), batch_specs(run)), out_specs=P())
    def of_rank(params: list[Layer], batch: Batch) -> Array:
        if pipeline is None:
            used = (chain(strategies, "weights", layer) for layer in params)
            return chain(strategies, "total", squared_error(forward(used, batch.x), batch))
        layers = [chain(strategies, "weights", Layer(w[0], b[0])) for w, b in params]
        stages = mesh.shape[pipeline.AXIS]
        stage = functools.partial(stage_of(forward, lax.axis_index(pipeline.AXIS), run), layers)
        return chain(strategies, "total", pipeline.execute(stage, squared_error, batch, stages))

    return of_rank(params, batch)


def per_rank_with_grads(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> tuple[Array, list[Layer]]:
    """The loss and the gradients of a pipeline in any order, whose backward passes are written."""
    strategies, schedule = load(run), schedule_of(run)
    forward = next((s.forward for s in strategies if hasattr(s, "forward")), model.forward)
    pipeline = pipeline_of(strategies)
    assert schedule is not None and pipeline is not None

    def used(params: list[Layer]) -> list[Layer]:
        return [chain(strategies, "weights", Layer(w[0], b[0])) for w, b in params]

    @jax.shard_map(mesh=mesh, in_specs=(params_specs(run), batch_specs(run)), out_specs=(P(), params_specs(run)))
    def of_rank(params: list[Layer], batch: Batch) -> tuple[Array, list[Layer]]:
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

    return of_rank(params, batch)


def stage_of(
    forward: Callable[..., Array], stage: Array, run: Run, chunk: int = 0, start: int = 0
) -> Callable[[list[Layer], Array], Array]:
    """What takes one microbatch through layers of a stage's chunk, from number `start` on, without those that only pad
    the stack: (layers, x) -> y."""
    schedule, unit = schedule_of(run), unit_of(run)
    assert schedule is not None
    exists = is_layer(run.problem.layers // unit, schedule.parts)

    def apply(layers: list[Layer], x: Array) -> Array:
        if exists.all():
            return forward(layers, x)
        for j in range(0, len(layers), unit):
            there = jnp.asarray(exists)[stage, chunk, (start + j) // unit]
            x = jnp.where(there, forward(layers[j : j + unit], x), x)
        return x

    return apply


def annotated(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The loss of the model as one device would compute it. Everything else follows from how arrays are split."""
    if (pipeline := pipeline_of(load(run))) is None:
        return squared_error(MLP(params)(batch.x), batch)
    stages = mesh.shape[pipeline.AXIS]
    schedule = schedule_of(run)
    assert schedule is not None
    exists = jnp.asarray(
        is_layer(run.problem.layers // unit_of(run), schedule.parts)[:, 0].repeat(unit_of(run), axis=1)
    )
    split = NamedSharding(mesh, P(pipeline.AXIS, *batch_specs(run).x[1:]))

    def stage(state: Array) -> Array:
        """Each stage takes its microbatch through its layers: Y[n_pp, b, F] = X[n_pp, b, D] @ W[n_pp, D, F]."""
        if run.problem.layers % (stages * unit_of(run)) == 0:
            return jax.vmap(lambda layers, x: MLP(layers)(x))(params, state)
        for j, layer in enumerate(params):
            y = jax.vmap(lambda layer, x: MLP([layer])(x))(layer, state)
            state = jnp.where(exists[:, j, None, None], y, state)
        return state

    constrain = functools.partial(lax.with_sharding_constraint, shardings=split)
    return pipeline.execute(stage, squared_error, batch, stages, constrain)


def abstract(mesh: Mesh, run: Run) -> tuple[list[Layer], Batch]:
    """The shapes, dtypes and shardings that `split_params` and `split_batch` give on `mesh`, without any array."""
    d, dtype = run.problem.width, jnp.dtype(run.problem.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)  # the dtype of the samples' weights, and hence of the loss
    layers, stages = stack_shape(run)
    of_stages = () if stages is None else (stages,)
    rows = -(-run.problem.batch // batch_shares(run)) * batch_shares(run)
    of_batch = (rows,) if stages is None else (run.microbatches, padded_rows(run) * batch_shares(run))

    def array(shape: tuple[int, ...], spec: P, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = [Layer(array((*of_stages, d, d), spec.w), array((*of_stages, d), spec.b)) for spec in params_specs(run)]
    x, y, weight = batch_specs(run)
    return params, Batch(array((*of_batch, d), x), array((*of_batch, d), y), array((*of_batch, 1), weight, wide))
