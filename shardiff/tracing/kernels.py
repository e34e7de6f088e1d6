"""Kernels in front of the operators of torch.distributed, so that a tracer sees these and no others.

An operator of c10d goes through torch's dispatcher whoever calls it, in whichever thread: Python, the C++ reducer of
DistributedDataParallel, a functional collective, compiled code. Ours are at a key that every call passes, below those
of autograd, of tensor subclasses and of dispatch modes, and above those of devices. Other operators cost nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardiff.tracing.dispatch import Tracer
from shardiff.tracing.libraries import below, operators_of
from shardiff.tracing.operators import OPERATORS

KEY = "BackendSelect"  # where c10d has no kernels of its own
LOCK = threading.Lock()


@dataclass
class Watched:
    """A process's tracers, outermost first; the kernels, while they are there; the threads that have passed by them."""

    tracers: list[Tracer] = field(default_factory=list)
    libraries: list[torch.library.Library] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)


def watched() -> Watched:
    """This process's. An operator has one kernel at a key, which another copy of this module finds here too."""
    attributes: dict[str, Any] = dist.__dict__
    return attributes.setdefault("_shardiff_watched", Watched())


@contextmanager
def shown_to(tracer: Tracer) -> Iterator[None]:
    """Every operator of torch.distributed that this process runs is shown to a tracer, as to those outside of it.

    The kernels are removed with the last tracer, unless other threads have passed by them: one could be about to enter
    a kernel, which must not be freed then.
    """
    here = watched()
    with LOCK:
        if not here.libraries:
            here.threads.clear()
            here.libraries += [library(space, here) for space in OPERATORS]
        here.tracers.append(tracer)
    try:
        yield
    finally:
        with LOCK:
            here.tracers.remove(tracer)
            if not here.tracers and here.threads <= {threading.get_ident()}:
                here.libraries.clear()


def library(space: str, here: Watched) -> torch.library.Library:
    """Our kernels for all operators of a namespace; they are removed with the library that is returned."""
    made = torch.library.Library(space, "IMPL")
    for name, operator in operators_of(space):
        made.impl(name, torch.compiler.disable(kernel(operator, here)), KEY, with_keyset=True)
    return made


def kernel(operator: Any, here: Watched) -> Callable[..., Any]:
    """What runs in front of an operator's own kernels."""

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        here.threads.add(threading.get_ident())
        go = partial(operator.redispatch, below(keys), *args, **kwargs)
        for tracer in tuple(here.tracers):
            go = partial(tracer.operator, operator, args, kwargs, go)
        return go()

    return run
