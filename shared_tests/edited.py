"""Edits the source of a module under test for the duration of a `with` block."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

STAY = "shardiff.ranks."  # modules that hold processes and devices
Edit = tuple[str, str]  # old, new; old must occur exactly once


def edited_source(module: str, edits: Sequence[Edit]) -> str:
    """The module's source with these edits. Raises ValueError if one does not match exactly once."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        source = file.read()
    for old, new in edits:
        if source.count(old) != 1:
            raise ValueError(f"{module} has {source.count(old)} times, not once: {old!r}")
        source = source.replace(old, new)
    return source


def put_in_place(module: str, edits: Sequence[Edit]) -> None:
    """Unload the module's package, except what must stay, and load the edited module in its place.

    What is imported from then on sees the edit; what was imported before does not.
    """
    source = edited_source(module, edits)
    package, _, _ = module.partition(".")
    parent, _, leaf = module.rpartition(".")
    for name in [name for name in sys.modules if name.startswith(f"{package}.") and not name.startswith(STAY)]:
        del sys.modules[name]
        vars(sys.modules[package]).pop(name.removeprefix(f"{package}."), None)
    changed = ModuleType(module)
    setattr(importlib.import_module(parent), leaf, changed)
    sys.modules[module] = changed
    exec(compile(source, f"<edited {module}>", "exec"), vars(changed))


@contextmanager
def edited(module: str, edits: Sequence[Edit]) -> Iterator[None]:
    """`put_in_place` for the duration of the `with` block. Import inside it what should see the edit."""
    package = importlib.import_module(module.partition(".")[0])
    attributes = dict(vars(package))
    modules = {name: m for name, m in sys.modules.items() if name.startswith(f"{package.__name__}.")}
    try:
        put_in_place(module, edits)
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith(f"{package.__name__}.")]:
            del sys.modules[name]
        sys.modules.update(modules)
        vars(package).clear()
        vars(package).update(attributes)
