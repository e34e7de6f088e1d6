"""Compile JAX programs for hardware that need not be here: `compile_all(jobs) -> [Compiled, ...]`.

A target is a name and a size: `cpu:8` devices, `h100:8` GPUs of one host or `h100:2x8` hosts x GPUs, `v5e:2x4` chips of
a TPU slice. XLA compiles for a description of the hardware (TPUs: the compiler's own; GPUs: `target_configs/`), and a
program that is lowered from shapes and shardings alone makes no array: a slice of 1,024 chips costs what one of 8 does.
jax is imported only when something is compiled, and its own devices stay as they are, started or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from shardiff.compiling import devices
from shardiff.compiling.hardware import PRECISIONS, Target
from shardiff.ranks.jax_devices import quiet_stderr


@dataclass(frozen=True)
class Job:
    """Something to compile. lower: makes a jax.stages.Lowered for the first `num_devices` devices of the target.

    what: its name in a refusal. x64: whether it is lowered with 64-bit types.
    """

    lower: Callable[[Sequence[Any]], Any]
    target: Target
    num_devices: int
    what: str = "the program"
    x64: bool = False


@dataclass(frozen=True)
class Memory:
    """What one device needs, in bytes, as the compiler has planned it. aliased: of outputs, what reuses arguments."""

    arguments: int
    outputs: int
    temporaries: int
    generated_code: int
    aliased: int


@dataclass(frozen=True)
class Compiled:
    """A compiled program: its optimized HLO text, its memory and flops (None where not counted) per device, and the
    seconds that it took to lower and compile."""

    target: Target
    hlo: str
    memory: Memory
    flops: float | None
    seconds: float


def compile_all(jobs: Sequence[Job], precision: str = "default") -> list[Compiled]:
    """Compile all jobs, in their order, TPU targets beside the others. Not to be called from two threads at once.

    precision: of matrix products, "default" (what a plain jit compiles to) or "highest". Raises ValueError, one line,
    for what cannot be compiled.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; known: {', '.join(PRECISIONS)}")
    for job in jobs:
        n, target = job.num_devices, job.target
        if n > target.num_devices:
            raise ValueError(f"{n} ranks need {n} devices, {target} has {target.num_devices}")
    for target in dict.fromkeys(job.target for job in jobs):
        devices.get(target)  # raises ValueError where there is no compiler

    # TPU programs one by one: libtpu's code generator for SparseCores overflows its stack where two run at once.
    with quiet_stderr(), ThreadPoolExecutor(1) as tpus, ThreadPoolExecutor(1) as others:
        pools = [tpus if job.target.kind == "tpu" else others for job in jobs]
        futures = [p.submit(compile_one, job, precision) for p, job in zip(pools, jobs, strict=True)]
        try:
            wait(futures)
        finally:  # after Ctrl-C, the rest is not compiled
            for future in futures:
                future.cancel()
    return [future.result() for future in futures]


def compile_one(job: Job, precision: str) -> Compiled:
    """Lower and compile one."""
    import jax

    start, target, n = time.perf_counter(), job.target, job.num_devices
    highest = "highest" if precision == "highest" else None
    options = devices.compiler_options(target.kind)
    with jax.enable_x64(job.x64), jax.default_matmul_precision(highest):
        try:
            compiled = job.lower(devices.get(target)[:n]).compile(options)
        except (jax.errors.JaxRuntimeError, NotImplementedError, AssertionError) as e:
            line = str(e).strip().partition("\n")[0]
            if n < target.num_devices and target.kind == "tpu":
                raise ValueError(f"{n} of the {target.num_devices} devices of {target} make no slice: {line}") from e
            raise ValueError(f"the compiler for {target} refuses {job.what} on {n} devices: {line}") from e
        plan, flops = compiled.memory_analysis(), (compiled.cost_analysis() or {}).get("flops")
        kinds = ("argument", "output", "temp", "generated_code", "alias")
        memory = Memory(*(getattr(plan, f"{kind}_size_in_bytes") for kind in kinds))
        return Compiled(target, compiled.as_text(), memory, flops, time.perf_counter() - start)
