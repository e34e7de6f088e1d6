"""A function for other processes. One that they can import is sent by name, any other by its code.

The receiving process has the same Python. A function of `__main__`, of a script or a notebook, lives in the receiver's
`__main__`, with the global variables that it names. Needs no torch.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import sys
import types
from typing import Any

Cell = types.CellType


def sendable(function: Any, arguments: tuple[Any, ...]) -> bytes:
    """The pickle of a function and its arguments, with the path on which their modules are found.

    Raises ValueError, one line, for what cannot be sent.
    """
    if not callable(function):
        raise ValueError(f"a function is traced, got {type(function).__name__}")
    out = io.BytesIO()
    name = getattr(function, "__qualname__", repr(function))
    try:
        _Pickler(out, 5).dump((list(sys.path), None))
        _Pickler(out, 5).dump((function, arguments))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} cannot be sent to other processes, with all that it uses: {reason}") from None
    return out.getvalue()


def receive(content: bytes) -> tuple[Any, tuple[Any, ...]]:
    """Inverse of `sendable`; extends sys.path."""
    file = io.BytesIO(content)
    path, _ = pickle.load(file)
    sys.path += [each for each in path if each not in sys.path]
    return pickle.load(file)


class _Pickler(pickle.Pickler):
    """Pickles functions and classes that cannot be imported by their content."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType):
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, staticmethod | classmethod):
            return type(obj), (obj.__func__,)
        if isinstance(obj, property):
            return property, (obj.fget, obj.fset, obj.fdel, obj.__doc__)
        if isinstance(obj, types.FunctionType) and not importable(obj):
            return _function(obj)
        if isinstance(obj, type) and not importable(obj):
            return _class(obj)
        return NotImplemented


def importable(obj: Any) -> bool:
    """Whether another process finds this very object under its name. `__main__` is another one there."""
    if obj.__module__ in (None, "__main__", "__mp_main__") or obj.__module__ not in sys.modules:
        return obj.__module__ == "builtins"
    found: Any = sys.modules[obj.__module__]
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _function(f: types.FunctionType) -> Any:
    module = f.__module__ if f.__module__ in sys.modules else "__main__"
    own = module in ("__main__", "__mp_main__")
    names = _names(f.__code__) if own else set()
    used = {name: f.__globals__[name] for name in sorted(names) if name in f.__globals__}
    state = {
        "globals": used,
        "defaults": f.__defaults__,
        "kwdefaults": f.__kwdefaults__,
        "cells": [_content(cell) for cell in f.__closure__ or ()],
        "dict": f.__dict__,
        "qualname": f.__qualname__,
        "doc": f.__doc__,
    }
    made = marshal.dumps(f.__code__), "__main__" if own else module, f.__name__, len(f.__closure__ or ())
    return make_function, made, state, None, None, fill_function


def _content(cell: Cell) -> tuple[Any, ...]:
    """What is in a cell; nothing where it is still empty."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _names(code: types.CodeType) -> set[str]:
    """The global names that a function, and those inside it, may use."""
    inside = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inside))


def make_function(code: bytes, module: str, name: str, cells: int) -> types.FunctionType:
    """A function without what it uses, which may be the function itself."""
    space = vars(importlib.import_module(module))
    made = types.FunctionType(marshal.loads(code), space, name, None, tuple(Cell() for _ in range(cells)))
    made.__module__ = module
    return made


def fill_function(f: types.FunctionType, state: dict[str, Any]) -> None:
    f.__globals__.update(state["globals"])
    f.__defaults__, f.__kwdefaults__ = state["defaults"], state["kwdefaults"]
    f.__qualname__, f.__doc__ = state["qualname"], state["doc"]
    f.__dict__.update(state["dict"])
    for cell, content in zip(f.__closure__ or (), state["cells"], strict=True):
        if content:
            cell.cell_contents = content[0]


def _class(c: type) -> Any:
    skipped = {"__dict__", "__weakref__", "__module__", "__doc__"}
    state = {name: value for name, value in vars(c).items() if name not in skipped}
    slots = state.get("__slots__", ())
    for name in [slots] if isinstance(slots, str) else slots:
        state.pop(name, None)
    given = {"__module__": "__main__", "__qualname__": c.__qualname__, "__doc__": c.__doc__}
    given |= {"__slots__": slots} if "__slots__" in state else {}
    return make_class, (type(c), c.__name__, c.__bases__, given), state, None, None, fill_class


def make_class(meta: Any, name: str, bases: tuple[type, ...], given: dict[str, Any]) -> type:
    return types.new_class(name, bases, {"metaclass": meta}, lambda space: space.update(given))


def fill_class(c: type, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if name not in ("__slots__", "__classcell__"):
            setattr(c, name, value)
