"""Faster compilation for what a test runs only a few times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quick_compilation() -> Iterator[None]:
    """JAX compiles without LLVM's expensive passes, in two thirds of the time.

    XLA's own passes run as always, including those that split the work over devices. The tests of the command line run
    every strategy with all optimizations.
    """
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def quickly(step: Any) -> Callable[..., Any]:
    """A jitted function, compiled at its first call in half the time, without XLA's emitters of fused loops.

    These come last, so how the program is split over devices and what it communicates has been decided before.
    """
    from jax_impl.jax_versions import WITHOUT_FUSION_EMITTERS

    compiled: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if not compiled:
            compiled.append(step.lower(*args).compile(compiler_options=WITHOUT_FUSION_EMITTERS))
        return compiled[0](*args)

    return call
