"""A training step compiled for hardware that need not be here, from shapes and shardings alone: no array is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from contract.problem import Batch
from contract.strategy import Run
from shardiff import compiling
from shardiff.compiling import Compiled, Job
from shardiff.compiling.hardware import Target


def compile(run: Run, target: Target, precision: str = "default", update: bool = False) -> Compiled:
    """Compile the loss and the gradients of `run` for the first `run.world_size` devices of `target`.

    precision: of matrix products, "default" (what a plain jit compiles to) or "highest" (what `train` runs). update:
    compile the whole step, with the optimizer's update, as is always done where ranks update different parts. Raises
    ValueError with one line for what cannot be compiled.
    """
    return compile_all([(run, target)], precision, update)[0]


def compile_all(jobs: Sequence[tuple[Run, Target]], precision: str = "default", update: bool = False) -> list[Compiled]:
    """`compile` for several jobs, in their order; see `shardiff.compiling.compile_all`."""
    for run, _ in jobs:
        if run.implementation == "torch":
            raise ValueError("torch is traced, not compiled; use shard_map or annotated")
    return compiling.compile_all([job(run, target, update) for run, target in jobs], precision)


def job(run: Run, target: Target, update: bool = False) -> Job:
    """The job for `shardiff.compiling` that compiles `run`."""

    def lowered(devices: Sequence[Any]) -> Any:
        from jax_impl.mesh import make_mesh

        return lower(run, make_mesh(run, list(devices)), update or run.state_is_split)

    return Job(lowered, target, run.world_size, run.strategy, run.problem.dtype == "float64")


def lower(run: Run, mesh: Any, update: bool) -> Any:
    """The step that `train` compiles, but without the gradients as a result, lowered for `mesh` from shapes.

    update: as in `compile`.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from jax_impl.compose import loss_and_grads
    from jax_impl.mesh import shardings
    from jax_impl.specs import abstract, params_specs
    from jax_impl.train import make_optimizer, make_step
    from jax_impl.updates import state_shardings

    params, batch = abstract(mesh, run)
    of_params, whole = jax.tree.map(lambda p: p.sharding, params), NamedSharding(mesh, PartitionSpec())
    of_grads = shardings(params_specs(run, "gradients"), mesh)
    if not update:

        def passes(params: list[Any], batch: Batch) -> tuple[Any, list[Any]]:
            return loss_and_grads(params, batch, mesh, run)

        return jax.jit(passes, out_shardings=(whole, of_grads)).lower(params, batch)
    optimizer = make_optimizer(run)
    of_state = state_shardings(optimizer, params, mesh, run)
    state = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        jax.eval_shape(optimizer.init, params),
        of_state,
    )
    step, out_shardings = make_step(mesh, run, optimizer, with_grads=False), (whole, of_params, of_state)
    return jax.jit(step, out_shardings=out_shardings, donate_argnums=(0, 1)).lower(params, state, batch)
