"""Compile faster what a test runs only a few times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_compilation() -> Iterator[None]:
    """JAX compiles without LLVM's expensive passes, in two thirds of the time.

    XLA's own passes run as always, those that split the work over devices among them; the command line's tests run
    every strategy with all optimizations.
    """
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
