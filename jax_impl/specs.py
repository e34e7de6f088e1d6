"""How the arrays of several strategies are split over the mesh, each on its own axis, and placed on its devices.

Under shard_map, specs are joined dim by dim, the innermost strategy first. In annotated, rules are merged. This module
knows no strategy by name: it asks each for the names in `contract.strategy`, and one that it omits changes nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from contract.axes import Axes
from contract.layout import batch_shares, chunks_of, padded_rows, schedule_of, unit_of
from contract.problem import Batch, pad_batch, split_microbatches
from contract.strategy import Run
from contract.transformer import Transformer
from jax_impl.mesh import place
from jax_impl.model import MLP, annotation_specs, batch_annotations, stack_stages
from jax_impl.transformer import Model

Strategies = Sequence[Any]  # modules, outermost first
Rules = dict[str, str | tuple[str, ...]]  # logical axis -> mesh axes


def load(run: Run, axes: Axes | None = None) -> Strategies:
    """The modules of a run's strategies, outermost first. axes: in another order."""
    return [importlib.import_module(f"jax_impl.{run.implementation}.{axis.strategy}") for axis in axes or run.nested]


def chain(strategies: Strategies, name: str, value: Any) -> Any:
    """Pass `value` through the function `name` of every strategy that has it, the outermost first."""
    for strategy in strategies:
        if hasattr(strategy, name):
            value = getattr(strategy, name)(value)
    return value


def pipeline_of(strategies: Strategies) -> Any | None:
    """The one strategy that has an order of execution of its own, if there is one."""
    return next((s for s in strategies if hasattr(s, "execute")), None)


def split_params(params: list[Any], mesh: Mesh, run: Run) -> list[Any]:
    """The full parameters on the devices of the mesh; with a pipeline, stacked over its stages."""
    if (schedule := schedule_of(run)) is not None:
        params = stack_stages(params, schedule.parts, unit_of(run))
    return place(params, params_specs(run), mesh)


def split_batch(batch: Batch, mesh: Mesh, run: Run) -> Batch:
    """The global batch on the devices of the mesh, padded to shares of one size: X[B, D], or X[m, b, D]."""
    shares = batch_shares(run)
    for axis, strategy in zip(run.nested, load(run), strict=True):
        if hasattr(strategy, "arranged"):
            batch = strategy.arranged(batch, axis.size)
    if pipeline_of(load(run)) is not None:
        return place(split_microbatches(batch, shares, run.microbatches), batch_specs(run), mesh)
    return place(pad_batch(batch, shares), batch_specs(run), mesh)


def params_specs(run: Run, of: str = "parameters") -> list[Any]:
    """The PartitionSpec of every parameter; or of its gradient or optimizer state, where they are split otherwise."""
    strategies, (layers, stages) = load(run), stack_shape(run)
    shapes = [run.problem.shape(i) for i in range(layers)]
    if run.implementation == "annotated":
        return annotation_specs(lambda params: module(params, run), shapes, merged_rules(strategies, of), stages)
    specs = [layer._make(P() for _ in layer) for layer in shapes]
    for strategy in reversed(strategies):
        if (mine := stated(strategy, "PARAMS_SPEC", of)) is not None:
            specs = [layer._make(map(join, layer, spec_of(mine, layer, i))) for i, layer in enumerate(specs)]
    if (pipeline := pipeline_of(strategies)) is not None:
        specs = [layer._make(P(pipeline.AXIS, *spec) for spec in layer) for layer in specs]
    return specs


def spec_of(stated: Any, layer: Any, number: int) -> Sequence[P]:
    """A strategy's PartitionSpecs of a layer's parameters: one for all, or by the layer's type, in turn."""
    if isinstance(stated, P):
        return (stated,) * len(layer)
    of_type = stated[type(layer)]
    return of_type[number % len(of_type)]


def split_dims(dims: dict[type, Any], axis: str) -> dict[type, list[Any]]:
    """Which dim of a layer's parameters is split, as PartitionSpecs: 1 is P(None, axis), None is P()."""

    def spec(dim: int | None) -> P:
        return P() if dim is None else P(*[None] * dim, axis)

    return {kind: [layer._make(map(spec, layer))] for kind, layer in dims.items()}


def module(params: list[Any], run: Run) -> Any:
    """The model in flax.nnx, with these parameters."""
    if isinstance(run.problem, Transformer):
        fused = run.spelling == "best" and any(getattr(s, "FUSED", False) for s in load(run))
        return Model(params, run.problem, run.recompute, fused)
    return MLP(params)


def stated(strategy: Any, name: str, of: str) -> Any | None:
    """What a strategy states about parameters, or about gradients or optimizer state if that differs."""
    names = {"parameters": (), "gradients": ("GRADS",), "optimizer_state": ("STATE", "GRADS")}[of]
    kind = name.removeprefix("PARAMS_")
    candidates = [*(f"{which}_{kind}" for which in names), name]
    return next((getattr(strategy, each) for each in candidates if hasattr(strategy, each)), None)


def stack_shape(run: Run) -> tuple[int, int | None]:
    """The number of layers per rank, and of the stages over which each is stacked; None without a pipeline."""
    if (schedule := schedule_of(run)) is None:
        return run.problem.depth, None
    unit = unit_of(run)
    return schedule.chunks * -(-(run.problem.depth // unit) // len(schedule.parts)) * unit, schedule.stages


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
        specs = batch_annotations(merged_rules(strategies), blocks=run.problem.unit == 2)
    else:
        specs = Batch(P(), P(), P())
        for strategy in load(run, run.cutting_the_batch):
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
            # Of samples, those of an inner axis are neighbours: only so can one all_to_all take them to experts.
            both = (axis, *before) if logical.startswith("batch") else (*before, axis)
            rules[logical] = both if before else axis
    return rules


def abstract(mesh: Mesh, run: Run) -> tuple[list[Any], Batch]:
    """The shapes, dtypes and shardings that `split_params` and `split_batch` give on `mesh`, without any array."""
    dtype = jnp.dtype(run.problem.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)  # the dtype of the samples' weights, and hence of the loss
    layers, stages = stack_shape(run)
    of_stages = () if stages is None else (stages,)
    rows = -(-run.problem.batch // batch_shares(run)) * batch_shares(run)
    of_batch = (rows,) if stages is None else (run.microbatches, padded_rows(run) * batch_shares(run))

    def array(shape: tuple[int, ...], spec: P, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = [
        layer._make(array((*of_stages, *shape), spec) for shape, spec in zip(run.problem.shape(i), layer, strict=True))
        for i, layer in enumerate(params_specs(run))
    ]
    tokens = () if run.problem.unit == 1 else (run.problem.sequence,)
    whole, one = (*of_batch, *tokens, run.problem.width), (*of_batch, *tokens, 1)
    x, y, weight = batch_specs(run)
    return params, Batch(array(whole, x), array(whole, y), array(one, weight, wide))
