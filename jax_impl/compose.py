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
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from contract.layout import batch_shares, padded_rows, unit_of
from contract.problem import Batch, Layer, pad_batch, split_microbatches
from contract.strategy import Run
from jax_impl import model
from jax_impl.collectives import all_reduce, varying
from jax_impl.mesh import place, shardings
from jax_impl.model import MLP, annotation_specs, batch_annotations, is_layer, squared_error, stack_stages

Strategies = Sequence[Any]  # modules, outermost first
Rules = dict[str, str | tuple[str, ...]]  # logical axis -> mesh axes


def load(run: Run) -> Strategies:
    """The modules of a run's strategies, outermost first."""
    return [importlib.import_module(f"jax_impl.{run.implementation}.{axis.strategy}") for axis in run.nested]


def chain(strategies: Strategies, name: str, value: Any) -> Any:
    """Pass `value` through the function `name` of every strategy that has it, the outermost first."""
    for strategy in strategies:
        if hasattr(strategy, name):
            value = getattr(strategy, name)(value)
    return value


def pipeline_of(strategies: Strategies) -> Any | None:
    """The one strategy that has an order of execution of its own, if there is one."""
    return next((s for s in strategies if hasattr(s, "execute")), None)


def split_params(params: list[Layer], mesh: Mesh, run: Run) -> list[Layer]:
    """The full parameters on the devices of the mesh; with a pipeline, stacked over its stages."""
    if (pipeline := pipeline_of(load(run))) is not None:
        params = stack_stages(params, mesh.shape[pipeline.AXIS], unit_of(run))
    return place(params, params_specs(run), mesh)


def split_batch(batch: Batch, mesh: Mesh, run: Run) -> Batch:
    """The global batch on the devices of the mesh, padded to shares of one size: X[B, D], or X[m, b, D]."""
    shares = batch_shares(run)
    if pipeline_of(load(run)) is not None:
        return place(split_microbatches(batch, shares, run.microbatches), batch_specs(run), mesh)
    return place(pad_batch(batch, shares), batch_specs(run), mesh)


def params_specs(run: Run, of: str = "parameters") -> list[Layer]:
    """The PartitionSpec of every parameter; or of its gradient or optimizer state, where they are split otherwise."""
    strategies, (layers, stages) = load(run), stack_shape(run)
    if run.implementation == "annotated":
        return annotation_specs(layers, merged_rules(strategies, of), stages)
    specs = [Layer(P(), P())] * layers
    for strategy in reversed(strategies):
        if (mine := stated(strategy, "PARAMS_SPEC", of)) is not None:
            specs = [Layer(*map(join, a, mine[i % len(mine)])) for i, a in enumerate(specs)]
    if (pipeline := pipeline_of(strategies)) is not None:
        specs = [Layer(*(P(pipeline.AXIS, *spec) for spec in layer)) for layer in specs]
    return specs


def stated(strategy: Any, name: str, of: str) -> Any | None:
    """What a strategy states about parameters, or about gradients or optimizer state if that differs."""
    names = {"parameters": (), "gradients": ("GRADS",), "optimizer_state": ("STATE", "GRADS")}[of]
    kind = name.removeprefix("PARAMS_")
    candidates = [*(f"{which}_{kind}" for which in names), name]
    return next((getattr(strategy, each) for each in candidates if hasattr(strategy, each)), None)


def stack_shape(run: Run) -> tuple[int, int | None]:
    """The number of layers per rank, and of the stages over which each is stacked; None without a pipeline."""
    if (pipeline := pipeline_of(load(run))) is None:
        return run.problem.layers, None
    stages, unit = run.mesh.size_of(pipeline.AXIS), unit_of(run)
    return -(-(run.problem.layers // unit) // stages) * unit, stages


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


def merged_rules(strategies: Strategies, of: str = "parameters") -> Rules:
    """The rules of all strategies as one dict. Where two split one dim, the outer one cuts the inner one's parts."""
    rules: Rules = {}
    for strategy in reversed(strategies):
        for logical, axis in (strategy.RULES | (stated(strategy, "RULES", of) or {})).items():
            before = rules.get(logical, ())
            before = before if isinstance(before, tuple) else (before,)
            rules[logical] = (*before, axis) if before else axis
    return rules


def loss(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The mean squared error over all samples: a scalar, the same on every rank."""
    by = annotated if run.implementation == "annotated" else per_rank
    return by(params, batch, mesh, run)


def loss_and_grads(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> tuple[Array, list[Layer]]:
    """The loss, and the gradients as a rank holds them. The backward communication is derived."""
    specs = params_specs(run, "gradients")
    if run.implementation == "annotated":
        value, grads = jax.value_and_grad(annotated)(params, batch, mesh, run)
        return value, constrained(grads, specs, mesh) if specs != params_specs(run) else grads

    @jax.shard_map(mesh=mesh, in_specs=(params_specs(run), batch_specs(run)), out_specs=(P(), specs))
    def of_rank(params: list[Layer], batch: Batch) -> tuple[Array, list[Layer]]:
        strategies = load(run)
        scatters = [s for s in strategies if hasattr(s, "gradients")]
        replicates = [s for s in strategies if scatters and getattr(s, "REPLICATED", False)]
        for strategy in (*scatters, *replicates):  # so that no sum is derived: gradients are this rank's part of it
            params = jax.tree.map(lambda p, axis=strategy.AXIS: varying(p, axis), params)
        value, grads = jax.value_and_grad(share_of_rank)(params, batch, mesh, run, skip=replicates)
        grads = map_layers(lambda layer: chain(scatters, "gradients", layer), grads, run)
        for strategy in replicates:  # only the shards are summed over replicas
            grads = jax.tree.map(lambda g, axis=strategy.AXIS: all_reduce(g, axis), grads)
        return value, grads

    return of_rank(params, batch)


def map_layers(f: Callable[[Layer], Layer], layers: list[Layer], run: Run) -> list[Layer]:
    """Apply a function to every layer of a rank. In a pipeline a layer has a dim of one stage in front."""
    if pipeline_of(load(run)) is None:
        return [f(layer) for layer in layers]
    return [Layer(*(a[None] for a in f(Layer(w[0], b[0])))) for w, b in layers]


def per_rank(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The loss as every rank computes it on its shards, with the collectives that the strategies write."""
    specs = (params_specs(run), batch_specs(run))
    return jax.shard_map(lambda p, b: share_of_rank(p, b, mesh, run), mesh=mesh, in_specs=specs, out_specs=P())(
        params, batch
    )


def share_of_rank(params: list[Layer], batch: Batch, mesh: Mesh, run: Run, skip: Strategies = ()) -> Array:
    """The loss, inside shard_map: the same on every rank. skip: whose `weights` are not used."""
    strategies = load(run)
    changes_weights = [s for s in strategies if s not in skip]
    forward = next((s.forward for s in strategies if hasattr(s, "forward")), model.forward)
    if (pipeline := pipeline_of(strategies)) is None:
        used = functools.partial(chain, changes_weights, "weights")
        if (policies := [s.GATHERED for s in strategies if hasattr(s, "GATHERED")]) and run.gathered_again:
            out = by_units(lambda layers, x: forward(map(used, layers), x), params, batch.x, unit_of(run), policies[0])
        else:
            out = forward(map(used, params), batch.x)
        return chain(strategies, "total", squared_error(out, batch))
    layers = [chain(changes_weights, "weights", Layer(w[0], b[0])) for w, b in params]
    stages = mesh.shape[pipeline.AXIS]
    stage = stage_of(forward, layers, lax.axis_index(pipeline.AXIS), run, stages)
    return chain(strategies, "total", pipeline.execute(stage, squared_error, batch, stages))


def by_units(forward: Callable[..., Array], params: list[Layer], x: Array, unit: int, policy: Any) -> Array:
    """The layers, `unit` at a time. policy: what of each unit is kept for the backward pass; the rest is made again."""
    again = jax.checkpoint(forward, policy=policy)
    for i in range(0, len(params), unit):
        x = again(params[i : i + unit], x)
    return x


def stage_of(
    forward: Callable[..., Array], layers: list[Layer], stage: Array, run: Run, stages: int
) -> Callable[[Array], Array]:
    """The function that takes one microbatch through the layers of a stage, skipping those that only pad the stack."""
    unit, exists = unit_of(run), is_layer(run.problem.layers // unit_of(run), stages)

    def apply(x: Array) -> Array:
        if exists.all():
            return forward(layers, x)
        for j in range(exists.shape[1]):
            x = jnp.where(jnp.asarray(exists)[stage, j], forward(layers[j * unit : (j + 1) * unit], x), x)
        return x

    return apply


def annotated(params: list[Layer], batch: Batch, mesh: Mesh, run: Run) -> Array:
    """The loss of the model as one device would compute it. Everything else follows from how arrays are split."""
    strategies, rules = load(run), merged_rules(load(run))
    states_activations = run.spelling == "best" and any(getattr(s, "ACTIVATIONS", False) for s in strategies)

    def as_stated(x: Array, kind: str) -> Array:
        spec = P(rules.get("batch"), rules.get(f"{kind}_out"))
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) if states_activations else x

    def layers_of(params: list[Layer], x: Array) -> Array:
        return MLP(params)(x, as_stated)

    if (pipeline := pipeline_of(strategies)) is None:
        policies = [s.GATHERED for s in strategies if hasattr(s, "GATHERED")]
        if policies and run.gathered_again and run.spelling == "best":
            return squared_error(by_units(layers_of, params, batch.x, unit_of(run), policies[0]), batch)
        return squared_error(layers_of(params, batch.x), batch)
    stages = mesh.shape[pipeline.AXIS]
    exists = jnp.asarray(is_layer(run.problem.layers // unit_of(run), stages).repeat(unit_of(run), axis=1))
    split = NamedSharding(mesh, P(pipeline.AXIS, *batch_specs(run).x[1:]))

    def stage(state: Array) -> Array:
        """Each stage takes its microbatch through its layers: Y[n_pp, b, F] = X[n_pp, b, D] @ W[n_pp, D, F]."""
        if run.problem.layers % (stages * unit_of(run)) == 0:
            return jax.vmap(layers_of, spmd_axis_name=pipeline.AXIS)(params, state)
        for j, layer in enumerate(params):
            y = jax.vmap(lambda layer, x: layers_of([layer], x), spmd_axis_name=pipeline.AXIS)(layer, state)
            state = jnp.where(exists[:, j, None, None], y, state)
        return state

    constrain = functools.partial(lax.with_sharding_constraint, shardings=split)
    return pipeline.execute(stage, squared_error, batch, stages, constrain)


def constrained(layers: list[Layer], specs: list[Layer], mesh: Mesh) -> list[Layer]:
    """Layers that are split as these PartitionSpecs say."""
    return lax.with_sharding_constraint(layers, shardings(specs, mesh))


def update(
    optimizer: optax.GradientTransformation, params: list[Layer], grads: list[Layer], state: Any, mesh: Mesh, run: Run
) -> tuple[list[Layer], Any]:
    """One optimizer step: the parameters and the state. Under shard_map a rank updates what it owns of them."""
    split = [s for s in load(run) if run.implementation == "shard_map" and hasattr(s, "own")]
    if not split:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state
    of_params, of_grads = params_specs(run), params_specs(run, "gradients")
    of_state = jax.tree.map(lambda a: a.spec, state_shardings(optimizer, params, mesh, run))

    # Not checked: that what all_gather returns is the same on every rank is not in its type.
    @jax.shard_map(
        mesh=mesh, in_specs=(of_params, of_grads, of_state), out_specs=(of_params, of_state), check_vma=False
    )
    def of_rank(params: list[Layer], grads: list[Layer], state: Any) -> tuple[list[Layer], Any]:
        whole = [s for s in split if not hasattr(s, "gradients")]
        mine = map_layers(lambda layer: chain(split, "own", layer), params, run)
        grads = map_layers(lambda layer: chain(whole, "own", layer), grads, run)
        updates, state = optimizer.update(grads, state, mine)
        mine = optax.apply_updates(mine, updates)
        return map_layers(lambda layer: chain(split, "whole", layer), mine, run), state

    return of_rank(params, grads, state)


def state_shardings(optimizer: optax.GradientTransformation, params: list[Layer], mesh: Mesh, run: Run) -> Any:
    """The shardings of the optimizer's state: split as the strategies say; its step counter is replicated."""
    state = jax.eval_shape(optimizer.init, params)
    return optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, s: s,
        state,
        shardings(params_specs(run, "optimizer_state"), mesh),
        transform_non_params=lambda _: NamedSharding(mesh, P()),
    )


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
