"""Faster compilation for what a test runs only a few times."""

from __future__ import annotations

import os
from importlib.metadata import version

from shardiff.ranks import jax_devices

# LLVM optimizes nothing and compiles a program in one piece. XLA's own passes run as always, including those that split
# the work over devices: what a program communicates has been decided before. It takes two thirds of the time.
FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)
if version("jax") < "0.11":  # from then on there are no others
    FLAGS += ("--xla_cpu_use_fusion_emitters=false",)  # emitters of fused loops


def flags() -> str:
    """XLA_FLAGS with which a process compiles quickly, beside those that are set."""
    return " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS)).strip()


def prepare(count: int) -> None:
    """Start JAX with `count` devices that compile quickly, in this process alone.

    Commands that a test starts find the environment as it was. They compile with all optimizations, and spend no time
    on a trial of variables that jax would read.
    """
    before = dict(os.environ)
    os.environ["XLA_FLAGS"] = flags()
    jax_devices.prepare(count, "auto")
    for name in [name for name in os.environ if name.startswith(("XLA_FLAGS", "JAX_"))]:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
