"""Where a call comes from: the user's line, and what torch does for it. Read off the stack of Python frames."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from shardiff.tracing.libraries import arranges_buckets, fsdp_params, fsdp_unit, in_setup

TORCH = str(Path(torch.__file__).parent)
NOT_THE_USER = (TORCH, str(Path(__file__).parents[1]), "<frozen", "<eval_with_key>")
DISPATCHING = ("_python_dispatch.py", "_ops.py", "_compile.py", "eval_frame.py")  # between us and an operator
WRAPPERS = ("contextlib.py", "functools.py", "typing_extensions.py", "threading.py", "subprocess.py")
LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("purelib", "platlib")})


@dataclass
class Where:
    """source: the user's line as file:line; where a library other than torch made the call, that library's line follows
    it. functions: the names of torch's functions that run. setup: one of them sets up. unit: the path of the module
    whose FSDP2 unit asks. differentiable: a torch.autograd.Function runs. reducer: the call is made by C++ alone.
    about: what a call is about that moves no data of the program's. params: the unit's, as `fsdp_params` has them."""

    source: str | None = None
    functions: set[str] = field(default_factory=set)
    setup: bool = False
    unit: str | None = None
    differentiable: bool = False
    reducer: bool = False
    about: str | None = None
    params: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)


def where() -> Where:
    """Of the code that called torch."""
    found, library, source = Where(), None, None
    first = True
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        kind, text = kind_of(code.co_filename)
        if kind in ("user", "library"):
            if kind == "user" and source is None and not frame.f_globals.get("__tracebackhide__"):
                line = f"{text}:{frame.f_lineno}"
                source = f"{line} ({library})" if library else line
            elif kind == "library" and library is None and not frame.f_globals.get("__tracebackhide__"):
                library = f"{text}:{frame.f_lineno}"
        elif kind != "none":
            if not source and not library:
                found.functions.add(code.co_name)
            if first and kind == "torch":
                found.reducer, first = code.co_name == "_engine_run_backward", False
                found.about = "which gradients are in which bucket" if arranges_buckets(frame) else None
            if in_setup(frame):
                found.setup = True
            if found.unit is None and (unit := fsdp_unit(frame)) is not None:
                found.unit, found.params = unit, fsdp_params(frame)
            if text == "function.py" and code.co_name == "apply":
                found.differentiable = True
        frame = frame.f_back
    found.setup = found.setup or found.about is not None
    found.source = source or library
    return found


def setting_up() -> bool:
    """Whether a function of torch runs that sets up."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(TORCH) and in_setup(frame):
            return True
        frame = frame.f_back
    return False


@cache
def kind_of(name: str) -> tuple[Literal["user", "library", "torch", "dispatching", "none"], str]:
    """Whose file this is, and what to call it; "dispatching" is a file of torch's between us and an operator."""
    if file := user_file(name):
        path = Path(name)
        return ("library", f"{path.parent.name}/{path.name}") if name.startswith(LIBRARIES) else ("user", file)
    if name.startswith(TORCH):
        return ("dispatching" if name.endswith(DISPATCHING) else "torch"), Path(name).name
    return "none", ""


@cache
def user_file(name: str) -> str | None:
    """The file's path, relative to the working directory if it is below; None for torch's, ours, and generated code."""
    path = Path(name)
    if name.startswith(NOT_THE_USER) or path.name in WRAPPERS or "torchinductor" in name or name.startswith("<"):
        return None
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name
