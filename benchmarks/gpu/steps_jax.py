"""Training steps of JAX on one device beside the device's own rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu import cuda
from benchmarks.gpu.jax_programs import arguments, compile_step, time_step, timed
from benchmarks.gpu.rates import device_rates, step_row
from benchmarks.gpu.sizes import Sizes
from contract.axes import one_axis
from contract.problem import Problem
from contract.strategy import Run
from shardiff.ranks.jax_devices import devices, prepare

DTYPES = ("bfloat16", "float32")
WARM_UP = 3


def measure(sizes: Sizes, keep: Any) -> None:
    """The rates of the device, then a step of each implementation; they differ only in what XLA is told."""
    prepare(1, sizes.device)
    (device,) = devices(1, sizes.device)
    rates, steps = [], []
    for dtype in DTYPES:
        rates.append(measure_rates(sizes, replace(sizes.step, dtype=dtype), device))
        keep({"rates": rates, "steps": steps})
    for name, model in (("annotated", sizes.step), ("shard_map", sizes.step), ("annotated", sizes.step_block)):
        for of_device in rates:
            steps.append(measure_step(sizes, name, replace(model, dtype=of_device["dtype"]), of_device, device))
            keep({"rates": rates, "steps": steps})


def measure_rates(sizes: Sizes, problem: Problem, device: Any) -> dict[str, Any]:
    """X[B, D] @ W[D, D] on random data, and a copy of as many bytes as the parameters have."""
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        keys = jax.random.split(jax.random.key(0), 2)
        x = jax.random.normal(keys[0], (problem.batch, problem.width), problem.dtype)
        w = jax.random.normal(keys[1], (problem.width, problem.width), problem.dtype)
        source = jnp.zeros(problem.layers * problem.width**2, problem.dtype)
        multiply, copy = jax.jit(jnp.matmul), jax.jit(jnp.copy)
        product = timed(lambda: jax.block_until_ready(multiply(x, w)), sizes.iterations, WARM_UP)
        copied = timed(lambda: jax.block_until_ready(copy(source)), sizes.iterations, WARM_UP)
    return device_rates("jax", problem, product, copied, 2 * source.nbytes)


def measure_step(sizes: Sizes, name: str, problem: Problem, rates: dict[str, Any], device: Any) -> dict[str, Any]:
    """The whole step, compiled as one program, as `jax_impl.train` compiles it."""
    run = Run(name, one_axis("single_device", 1), problem, device=sizes.device)
    lowered, compiled = compile_step(run, [device])
    seconds = time_step(compiled, arguments(lowered, compiled), sizes.iterations, WARM_UP)
    return step_row(rates, name, problem, {"step": seconds}, cuda.jax_peak_bytes(device))
