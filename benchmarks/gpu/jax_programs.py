"""Compiled JAX programs that are run on arrays made for them, whatever devices of theirs are in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from contract.strategy import Run
from jax_impl.compiled import lower
from jax_impl.mesh import make_mesh


def compile_step(run: Run, devices: Sequence[Any]) -> Any:
    """The whole step of a run, compiled from shapes, and its arguments: (compiled, [params, state, batch])."""
    with jax.enable_x64(run.problem.dtype == "float64"), jax.default_matmul_precision("highest"):
        lowered = lower(run, make_mesh(run, devices), update=True)
        return lowered, lowered.compile()


def arguments(lowered: Any, compiled: Any) -> list[Any]:
    """Random arrays for every argument, of which this process makes the shards that its devices hold."""
    few = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32) * 0.02
    drawn: dict[tuple[Any, ...], np.ndarray] = {}  # to draw each anew would take longer than the steps

    def fill(info: Any, sharding: Any) -> jax.Array:
        shape = sharding.shard_shape(info.shape)
        if (shape, info.dtype) not in drawn:
            random = jnp.issubdtype(info.dtype, jnp.floating)
            drawn[shape, info.dtype] = np.resize(few if random else np.zeros(1), shape).astype(info.dtype)
        shard = drawn[shape, info.dtype]
        local = [jax.device_put(shard, device) for device in sharding.addressable_devices]
        return jax.make_array_from_single_device_arrays(info.shape, sharding, local)

    infos, shardings = lowered.args_info[0], compiled.input_shardings[0]
    return list(jax.tree.map(fill, infos, shardings))


def time_step(compiled: Any, given: list[Any], iterations: int, warmup: int) -> list[float]:
    """Seconds of each step, waited for; a step gives the next its parameters and its state."""
    params, state, batch = given

    def step() -> None:
        nonlocal params, state
        _, params, state = jax.block_until_ready(compiled(params, state, batch))

    return timed(step, iterations, warmup)


def timed(act: Callable[[], Any], iterations: int, warmup: int) -> list[float]:
    """Seconds of each call after the warm-up; `act` waits for what it starts."""
    seconds = []
    for _ in range(warmup + iterations):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return seconds[warmup:]
