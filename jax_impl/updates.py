"""The optimizer's step over a mesh: what each rank updates, and how the optimizer's state is split."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from contract.strategy import Run
from jax_impl.compose import map_layers
from jax_impl.mesh import shardings
from jax_impl.specs import chain, load, params_specs


@jax.named_scope("update")
def update(
    optimizer: optax.GradientTransformation, params: list[Any], grads: list[Any], state: Any, mesh: Mesh, run: Run
) -> tuple[list[Any], Any]:
    """One optimizer step: the parameters and the state. Under shard_map a rank updates what it owns of them."""
    split = [s for s in load(run) if run.implementation == "shard_map" and hasattr(s, "own")]
    if not split:
        return apply(optimizer, grads, state, params)
    of_params, of_grads = params_specs(run), params_specs(run, "gradients")
    of_state = jax.tree.map(lambda a: a.spec, state_shardings(optimizer, params, mesh, run))

    # Not checked: that what all_gather returns is the same on every rank is not in its type.
    @jax.shard_map(
        mesh=mesh, in_specs=(of_params, of_grads, of_state), out_specs=(of_params, of_state), check_vma=False
    )
    def of_rank(params: list[Any], grads: list[Any], state: Any) -> tuple[list[Any], Any]:
        whole = [s for s in split if not hasattr(s, "gradients")]
        mine = map_layers(lambda layer: chain(split, "own", layer), params, run)
        grads = map_layers(lambda layer: chain(whole, "own", layer), grads, run)
        mine, state = apply(optimizer, grads, state, mine)
        return map_layers(lambda layer: chain(split, "whole", layer), mine, run), state

    return of_rank(params, grads, state)


def apply(
    optimizer: optax.GradientTransformation, grads: list[Any], state: Any, params: list[Any]
) -> tuple[list[Any], Any]:
    """The updated parameters, and the optimizer's state."""
    updates, state = optimizer.update(grads, state, params)
    updated: Any = optax.apply_updates(params, updates)
    return updated, state


def state_shardings(optimizer: optax.GradientTransformation, params: list[Any], mesh: Mesh, run: Run) -> Any:
    """The shardings of the optimizer's state: split as the strategies say; its step counter is replicated."""
    state = jax.eval_shape(optimizer.init, params)
    return optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, s: s,
        state,
        shardings(params_specs(run, "optimizer_state"), mesh),
        transform_non_params=lambda _: NamedSharding(mesh, P()),
    )
