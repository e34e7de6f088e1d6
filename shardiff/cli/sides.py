"""The two sides of a diff: what an argument names, turned into a Program with a label that says what it is."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardiff.compiling import launch
from shardiff.compiling.hardware import parse
from shardiff.compiling.meshes import parse_axes, sized
from shardiff.compiling.reading import read
from shardiff.mesh import parse as parse_mesh
from shardiff.program import Program
from shardiff.system.extras import require

ROOT = str(Path(__file__).parents[2])
KINDS = "a .json of shardiff's, HLO text, FILE.py:FUNCTION with --target and --mesh, or a torch script with --nproc"
FUNCTION = re.compile(r"(?:.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")


class SideError(Exception):
    """The user's code failed. The message is one line, status the exit status; its own error is on standard error."""

    def __init__(self, message: str, status: int = 3) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Side:
    """One argument of `shardiff diff` with the options that are about it. Made by `plan`, which refuses what cannot be.

    kind: "file", "function" or "script". target, axes: of a function. mesh: the axes of a file's ranks, or None.
    nproc: the ranks of a script.
    """

    text: str
    kind: str
    target: str | None = None
    mesh: str | None = None
    nproc: int | None = None


def plan(
    arguments: Sequence[str],
    targets: tuple[str | None, str | None] = (None, None),
    meshes: tuple[str | None, str | None] = (None, None),
    nproc: int | None = None,
) -> tuple[Side, Side]:
    """The arguments as two sides. targets, meshes: of the left and of the right one, as text.

    Raises ValueError, one line, for what cannot work.
    """
    if len(arguments) != 2:
        raise ValueError(f"diff compares two programs, got {len(arguments)}; each may be {KINDS}")
    if nproc is not None and nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    left, right = (side_of(*each, nproc) for each in zip(arguments, targets, meshes, strict=True))
    if any(targets) and "function" not in (left.kind, right.kind):
        raise ValueError("--target is what a function is compiled for, FILE.py:FUNCTION, and neither side is one")
    if nproc is not None and "script" not in (left.kind, right.kind):
        raise ValueError("--nproc is for a torch script, SCRIPT.py, and neither side is one")
    return left, right


def side_of(text: str, target: str | None, mesh: str | None, nproc: int | None) -> Side:
    """What an argument names. Raises ValueError."""
    if FUNCTION.fullmatch(text):
        launch.place_of(text)
        if target is None:
            raise ValueError(f"{text} needs a --target to be compiled for, such as cpu:8, h100:8 or v5e:4x4")
        if mesh is None:
            raise ValueError(f"{text} needs the axes of its mesh, such as --mesh dp={parse(target).num_devices}")
        sized(parse_axes(mesh), parse(target))
        require("a compiled function", "jax")
        return Side(text, "function", target, mesh)
    path = Path(text)
    if text != "-" and not path.exists():
        raise ValueError(f"{text}: no such file; each side may be {KINDS}")
    if path.suffix == ".py" and path.is_file():
        require("a traced script", "torch")
        return Side(text, "script", mesh=mesh and str(parse_mesh(mesh)), nproc=nproc or 2)
    return Side(text, "file", mesh=mesh and str(parse_mesh(mesh)))


def program(side: Side) -> Program:
    """Read, compile or trace a side. Raises ValueError, one line, and SideError where the user's code failed."""
    if side.kind == "function":
        try:
            (found,) = launch.programs(side.text, [str(side.target)], parse_axes(str(side.mesh)), stdout=2)
        except launch.UserCodeError as error:
            raise SideError(str(error)) from None
        return found
    if side.kind == "script":
        return traced(side)
    return read(Path(side.text), mesh=side.mesh, label=Path(side.text).name if side.text != "-" else "<stdin>")


def traced(side: Side) -> Program:
    """What a torch script communicates, from `shardiff trace` in a process of its own."""
    code = f"import sys; sys.path.insert(0, {ROOT!r}); from shardiff.cli.main import main; sys.path.remove({ROOT!r}); "
    command = [sys.executable, "-P", "-c", f"{code}sys.exit(main())", "trace", "--nproc", str(side.nproc), "--json"]
    with tempfile.TemporaryDirectory(prefix="shardiff-") as folder:
        file = Path(folder, "trace.json")
        with file.open("wb") as output:
            status = subprocess.run([*command, side.text], stdout=output).returncode
        if status:
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            raise SideError(f"the trace of {side.text} ended with {how}", status if status > 0 else 128 - status)
        found = read(file, mesh=side.mesh)
    ranks = f"{side.nproc} rank{'s' * (side.nproc != 1)}"
    return replace(found, label=f"{Path(side.text).name} on {ranks}")
