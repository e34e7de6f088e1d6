"""What a program communicates, and how two programs differ.

    program = shardiff.read(jax.jit(step).lower(*args))      an XLA program: compiled or lowered, its text, or a dump
    mesh = shardiff.mesh("v5e:4x4", dp=4, tp=4)              a jax.sharding.Mesh of devices that need not be here
    program = shardiff.trace(step, nproc=2)                  a torch function, run on two ranks
    shardiff.diff(left, right).assert_same()

Importing this module imports no framework: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardiff.compiling.abstract import abstract as abstract
    from shardiff.compiling.meshes import mesh as mesh
    from shardiff.compiling.reading import compile as compile
    from shardiff.compiling.reading import read as read
    from shardiff.diff import Diff as Diff
    from shardiff.diff import diff as diff
    from shardiff.program import Program as Program
    from shardiff.record import Record as Record
    from shardiff.tracing.api import step as step
    from shardiff.tracing.api import trace as trace
    from shardiff.tracing.api import tracing as tracing

__all__ = ["Diff", "Program", "Record", "abstract", "compile", "diff", "mesh", "read", "step", "trace", "tracing"]

_HOME = {
    "Diff": "shardiff.diff",
    "Program": "shardiff.program",
    "Record": "shardiff.record",
    "abstract": "shardiff.compiling.abstract",
    "compile": "shardiff.compiling.reading",
    "diff": "shardiff.diff",
    "mesh": "shardiff.compiling.meshes",
    "read": "shardiff.compiling.reading",
    "step": "shardiff.tracing.api",
    "trace": "shardiff.tracing.api",
    "tracing": "shardiff.tracing.api",
}


class _CallableModule(ModuleType):
    """A module of the package whose name is a function's too: `shardiff.diff(a, b)`, and `from shardiff.diff import x`.

    The import system puts every imported submodule on its package, so the module has to be the function as well.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _load(self.__name__.rpartition(".")[2])(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(_load(self.__name__.rpartition(".")[2]))


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and type(value) is ModuleType:
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


def _load(name: str) -> Any:
    try:
        return getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        from shardiff.system.extras import EXTRAS, missing

        if error.name not in EXTRAS:
            raise
        raise missing(f"shardiff.{name}", error.name) from None


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardiff' has no attribute {name!r}")
    found = _load(name)
    return globals().get(name, found)  # the callable module, where importing it has put that here


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
