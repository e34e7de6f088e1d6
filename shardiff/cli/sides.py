"""The two sides of a diff: what an argument names, turned into a Program with a label that says what it is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardiff.compiling import launch
from shardiff.compiling.hardware import parse
from shardiff.compiling.meshes import parse_axes, sized
from shardiff.compiling.reading import read
from shardiff.mesh import parse as parse_mesh
from shardiff.program import Program
from shardiff.system.extras import require
from shardiff.tracing.traced import Options, trace_program

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

    kind: "file", "function", "script", or "made" by the caller. target, axes: of a function. mesh: the axes of a
    file's ranks, or None. nproc, arguments: the ranks of a script, and what it is given. step: of a traced run, None
    for the last, 0 for all.
    """

    text: str
    kind: str
    target: str | None = None
    mesh: str | None = None
    nproc: int | None = None
    step: int | None = None
    arguments: tuple[str, ...] = ()
    make: Callable[[], Program] | None = None


def plan(
    arguments: Sequence[str],
    targets: tuple[str | None, str | None] = (None, None),
    meshes: tuple[str | None, str | None] = (None, None),
    nproc: int | None = None,
    step: int | None = None,
    made: Mapping[str, Callable[[], Program]] | None = None,
) -> tuple[Side, Side]:
    """The arguments as two sides. targets, meshes: of the left and of the right one, as text; nproc, step: of both.

    made: what makes the programs of arguments that only the caller knows, such as a strategy.

    Raises ValueError, one line, for what cannot work.
    """
    if len(arguments) != 2:
        raise ValueError(f"diff compares two programs, got {len(arguments)}; each may be {KINDS}")
    if nproc is not None and nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    if step is not None and step < 0:
        raise ValueError(f"step must be the number of a training step, or 0 for the whole run; got {step}")
    known = made or {}

    def side(text: str, target: str | None, mesh: str | None) -> Side:
        if text in known:
            return Side(text, "made", make=known[text])
        return replace(side_of(text, target, mesh, nproc), step=step)

    left, right = (side(*each) for each in zip(arguments, targets, meshes, strict=True))
    if any(targets) and "function" not in (left.kind, right.kind):
        raise ValueError("--target is what a function is compiled for, FILE.py:FUNCTION, and neither side is one")
    if nproc is not None and not {"script", "made"} & {left.kind, right.kind}:
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
    words = shlex.split(text) if path.suffix != ".py" and ".py " in text and not path.exists() else [text]
    if words[0].endswith(".py") and Path(words[0]).is_file():
        require("a traced script", "torch")
        return Side(
            words[0], "script", mesh=mesh and str(parse_mesh(mesh)), nproc=nproc or 2, arguments=tuple(words[1:])
        )
    if text != "-" and not path.exists():
        raise ValueError(f"{text}: no such file; each side may be {KINDS}")
    return Side(text, "file", mesh=mesh and str(parse_mesh(mesh)))


def program(side: Side) -> Program:
    """Read, compile or trace a side. Raises ValueError, one line, and SideError where the user's code failed."""
    if side.make is not None:
        return side.make()
    if side.kind == "function":
        try:
            (found,) = launch.programs(side.text, [str(side.target)], parse_axes(str(side.mesh)), stdout=2)
        except launch.UserCodeError as error:
            raise SideError(str(error)) from None
        return found
    if side.kind == "script":
        return one_step(traced(side), side.step)
    name = Path(side.text).name if side.text != "-" else "<stdin>"
    return one_step(read(Path(side.text), mesh=side.mesh, label=name), side.step)


def one_step(run: Program, step: int | None) -> Program:
    """One training step of a traced run: the last, which is a steady one, or the one asked for; 0: the whole run.

    Where it is not known where a step ends, the whole. Raises ValueError for a step that the run does not have.
    """
    steps = run.steps
    if step is not None and step > len(steps):
        raise ValueError(f"{run.label} has {len(steps)} training steps, so there is no step {step}")
    if step == 0 or not steps:
        return run
    number = step or len(steps)
    return replace(steps[number - 1], label=f"{run.label} (step {number} of {len(steps)})", mesh=run.mesh)


def traced(side: Side) -> Program:
    """What a torch script communicates in its whole run. Raises SideError where it fails or its ranks disagree."""
    name = shlex.join([Path(side.text).name, *side.arguments])
    label = f"{name} on {side.nproc} rank{'s' * (side.nproc != 1)}"
    try:
        done = trace_program("script", side.text, side.arguments, side.nproc, Options(quiet=True), label)
    except ValueError as error:
        raise SideError(f"the trace of {side.text}: {error}", 2) from None
    if isinstance(done, int):
        raise SideError(f"the trace of {side.text} ended with status {done}", done or 3)
    if done.status:
        raise SideError(f"the trace of {side.text} ended with status {done.status}", done.status)
    if done.errors:
        raise SideError(f"the trace of {side.text}: {done.errors[0]}", 1)
    return replace(done.program, mesh=parse_mesh(side.mesh) if side.mesh else None)
