"""A training step compiled for hardware that need not be here, from shapes and shardings alone: no array is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from contract.problem import Batch, Layer
from contract.strategy import Run
from shardiff import compiling
from shardiff.compiling import Compiled, Job
from shardiff.compiling.hardware import Target


def compile(run: Run, target: Target, precision: str = "default", update: bool = False) -> Compiled:
    """Compile the loss and the gradients of `run` for the first `run.degree` devices of `target`.

    precision: of matrix products, "default" (what a plain jit compiles to) or "highest" (what `train` runs). update:
    the whole step, with the optimizer's update. Raises ValueError, one line, for what cannot be compiled.
    """
    return compile_all([(run, target)], precision, update)[0]


def compile_all(jobs: Sequence[tuple[Run, Target]], precision: str = "default", update: bool = False) -> list[Compiled]:
    """`compile` for many, in their order; see `shardiff.compiling.compile_all`."""
    for run, _ in jobs:
        if run.implementation == "torch":
            raise ValueError("torch is traced, not compiled; to compile: shard_map, annotated")
    return compiling.compile_all([job(run, target, update) for run, target in jobs], precision)


def job(run: Run, target: Target, update: bool = False) -> Job:
    """What `shardiff.compiling` is to compile for `run`."""

    def lowered(devices: Sequence[Any]) -> Any:
        from jax_impl.train import make_mesh

        return lower(run, make_mesh(run, list(devices)), update)

    return Job(lowered, target, run.degree, run.strategy, run.problem.dtype == "float64")


def lower(run: Run, mesh: Any, update: bool) -> Any:
    """The step as `train` compiles it, lowered for `mesh` from shapes: loss and gradients, or all of it."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from jax_impl.train import load, make_optimizer, make_step, state_shardings

    strategy = load(run)
    params, batch = shapes(strategy, mesh, run)
    of_params, whole = jax.tree.map(lambda p: p.sharding, params), NamedSharding(mesh, PartitionSpec())
    if not update:

        def loss_and_grads(params: list[Layer], batch: Batch) -> tuple[Any, list[Layer]]:
            return strategy.loss_and_grads(params, batch, mesh, run)

        return jax.jit(loss_and_grads, out_shardings=(whole, of_params)).lower(params, batch)
    optimizer = make_optimizer(run)
    of_state = state_shardings(optimizer, params, mesh)
    state = with_shardings(jax.eval_shape(optimizer.init, params), of_state)
    step, out_shardings = make_step(strategy, mesh, run, optimizer), (whole, of_params, of_params, of_state)
    return jax.jit(step, out_shardings=out_shardings, donate_argnums=(0, 1)).lower(params, state, batch)


def shapes(strategy: Any, mesh: Any, run: Run) -> tuple[list[Layer], Batch]:
    """The shapes, dtypes and shardings of what the strategy's split_params and split_batch would place on `mesh`.

    They are traced over the same devices as a mesh of Explicit axes: there a sharding is part of an array's type, so
    it comes out of a trace in which nothing is placed. What goes in are views of one zero.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    rows, width, dtype = run.problem.batch, run.problem.width, jnp.dtype(run.problem.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)  # as `train.make_batch` has it

    def array(*shape: int, dtype: Any = dtype) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)

    full = [Layer(array(width, width), array(width))] * run.problem.layers
    batch = Batch(array(rows, width), array(rows, width), array(rows, 1, dtype=wide))
    typed = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,))
    split = jax.eval_shape(lambda: (strategy.split_params(full, typed, run), strategy.split_batch(batch, typed, run)))
    shardings = jax.tree.map(lambda a: NamedSharding(mesh, a.sharding.spec if a.sharding else PartitionSpec()), split)
    return with_shardings(split, shardings)


def with_shardings(tree: Any, shardings: Any) -> Any:
    """Shapes with shardings beside them -> shapes that carry theirs."""
    import jax

    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings)
