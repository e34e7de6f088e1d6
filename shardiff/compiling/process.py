"""A process of its own in which a user's function is compiled: nothing but the user's code and `shardiff` is loaded.

    python -P -c "... main()" RESULT REQUEST

REQUEST is JSON: where the function is, the axes, the targets. RESULT is a file for the answer: `programs`, a `refusal`
in one line, or what `failed` in the user's code, whose traceback has then been printed.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardiff.compiling.devices import load_quietly
from shardiff.compiling.hardware import parse
from shardiff.compiling.meshes import on, sized
from shardiff.compiling.reading import read

MOST = 200  # characters of an error's message in one line


class Failed(Exception):
    """The user's code raised. The message says what, in one line; the traceback has been printed."""


def main() -> None:
    """Compile for every target, and write the answer."""
    result, request = Path(sys.argv[1]), json.loads(sys.argv[2])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the command
    try:
        answer: dict[str, Any] = {"programs": programs(**request)}
    except ValueError as error:
        answer = {"refusal": str(error)}
    except Failed as error:
        answer = {"failed": str(error)}
    result.write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that the user's code has left running have no say


def programs(place: str, name: str, axes: dict[str, int], targets: list[str]) -> list[dict[str, Any]]:
    """What `name` of the file or module `place` communicates on each target, in plain JSON types.

    Raises ValueError, one line, for what cannot be compiled, and Failed.
    """
    shown = f"{place}:{name}"
    load_quietly()
    module = load(place)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ValueError(f"{place} has no function {name!r}; it has {', '.join(own) or 'none'}")
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise ValueError(f"{shown} must take one argument, the mesh; it takes {inspect.signature(function)}") from None
    except ValueError:  # a builtin, whose signature is not known
        pass
    found = []
    for text in targets:
        target = parse(text)
        ranks = sized(axes, target)
        mesh = on(target, ranks)
        with told(f"{shown} for {target}"):
            lowered = lower(shown, function(mesh))
        found.append({"target": text, "mesh": str(ranks), **compiled(shown, text, lowered)})
    return found


def load(place: str) -> Any:
    """The user's module: a file, beside which it finds what it imports as when it is run, or a module by its name."""
    sys.argv[:] = [place]
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        with told(place):
            return importlib.import_module(place)
    path = Path(place).resolve()
    sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules else f"{path.stem} of the user"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with told(place):
        spec.loader.exec_module(module)
    return module


def lower(shown: str, made: Any) -> Any:
    """What the user's function has returned, lowered, or compiled where it is so already."""
    import jax

    if hasattr(made, "as_text") and (hasattr(made, "compile") or hasattr(made, "memory_analysis")):
        return made
    if not (isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0])):
        raise ValueError(f"{shown} must return (function, args) or a jax.stages.Lowered; it returned {described(made)}")
    function, args, *rest = made
    kwargs = rest[0] if rest else {}
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        raise ValueError(f"{shown} must return (function, args), args a tuple; its args are {described(args)}")
    return (function if hasattr(function, "lower") else jax.jit(function)).lower(*args, **kwargs)


def described(value: Any) -> str:
    """The type of a value, and of a tuple's members."""
    if isinstance(value, tuple):
        return f"a tuple of ({', '.join(type(member).__name__ for member in value)})"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def compiled(shown: str, target: str, lowered: Any) -> dict[str, Any]:
    """The program in plain JSON types. Raises ValueError where the compiler refuses it."""
    import jax

    try:
        program = read(lowered)
    except jax.errors.JaxRuntimeError as error:
        line = str(error).strip().partition("\n")[0]
        raise ValueError(f"the compiler for {target} refuses {shown}: {line}") from None
    axes = program.mesh.axes if program.mesh else ()
    return {
        "module": program.label,
        "axes": [list(axis) for axis in axes],
        "memory": program.memory,
        "records": [record.to_json() for record in program.records],
    }


@contextmanager
def told(what: str) -> Iterator[None]:
    """Print the traceback of what the user's code raises, from its own frame on; then raise Failed."""
    try:
        yield
    except SystemExit as end:
        raise Failed(f"{what} ended the process with status {end.code}") from None
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and not_the_user_s(frames.tb_frame.f_code.co_filename):
            frames = frames.tb_next
        if isinstance(error, ValueError) and frames is None:  # what it has returned is refused
            raise
        traceback.print_exception(type(error), error, frames)
        message = " ".join(str(error).split())
        said = f": {message if len(message) <= MOST else message[: MOST - 3] + '...'}" if message else ""
        raise Failed(f"{what} raised {type(error).__name__}{said}") from None


def not_the_user_s(file: str) -> bool:
    """Whether a frame is this package's, jax's, or the import system's."""
    ours = [str(Path(__file__).parents[1])]
    ours += [str(Path(sys.modules["jax"].__file__ or "").parent)] if "jax" in sys.modules else []
    return file.startswith("<frozen ") or file == importlib.__file__ or any(file.startswith(f + os.sep) for f in ours)
