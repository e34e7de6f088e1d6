"""`shardiff trace`: run any torch program in N processes as torchrun would, and show what they communicate."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from shardiff import baseline, budget
from shardiff.cli.trace_view import FORMATS, present
from shardiff.program import Program
from shardiff.tracing.torchrun import under_torchrun
from shardiff.tracing.traced import Options, trace_program

OPTIONS = (
    *("--nproc", "--verify", "--strict", "--values", "--timeout", "--steps", "--all", "--format", "--json"),
    *("--fail-on", "--baseline", "--update-baseline"),
)
STATUS = {"mismatch": 1, "deadlock": 1, "stuck": 3}


@dataclass(frozen=True)
class Request:
    """What the command line asks for: what to run, what to look for, and what to show.

    target: a script, or with `module` a module's name. steps: so many are told one by one. every: show each record.
    """

    target: str
    arguments: Sequence[str] = ()
    module: bool = False
    nproc: int | None = None
    options: Options = Options()
    format: str = "table"
    steps: int | None = None
    every: bool = False
    fail_on: Sequence[str] = ()
    baseline: Path | None = None
    update_baseline: bool = False


def refusal(asked: Request) -> str | None:
    """Why this cannot be traced, in one line; None if it can."""
    nproc, timeout = asked.nproc, asked.options.timeout
    if nproc is not None and nproc < 0:
        return f"nproc must be at least 1, or 0 for a script that starts its own ranks; got {nproc}"
    if asked.module:
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", asked.target):
            return f"{asked.target!r} is no name of a module; a file is traced without -m"
        package = asked.target.partition(".")[0]
        if not (find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])):
            return f"no module named {package!r} here"
    elif not (script := Path(asked.target)).is_file():
        return f"{script}: {'is a directory' if script.is_dir() else 'no such file'}"
    elif not os.access(script, os.R_OK):
        return f"{script}: cannot be read"
    try:
        here = under_torchrun()
    except ValueError as error:
        return str(error)
    if "RANK" in os.environ and not here:
        return "RANK is set, but not by torchrun: unset it, or start shardiff by torchrun"
    if here and nproc not in (None, here.world_size):
        return f"torchrun has started {here.world_size} processes already, so nproc cannot be {nproc}"
    if timeout is not None and not 0 < timeout < math.inf:
        return f"timeout must be a number of seconds above 0, got {timeout}"
    verify = asked.options.verify or asked.options.strict
    if verify and here and here.world_size != here.local_world_size:
        return "verify needs all processes on one machine, and torchrun has others elsewhere"
    if asked.format not in FORMATS:
        return f"unknown format {asked.format!r}; known: {', '.join(FORMATS)}"
    if asked.steps is not None and asked.steps < 1:
        return f"steps must be at least 1, got {asked.steps}"
    try:
        for text in asked.fail_on:
            budget.parse_budget(text)
        baseline.check(asked.baseline, [label(asked)], asked.update_baseline)
    except ValueError as error:
        return str(error)
    return None


def label(asked: Request) -> str:
    """What is run, as one would type it."""
    return shlex.join([*(["-m"] if asked.module else []), asked.target, *asked.arguments])


def show(asked: Request) -> int:
    """Run, print, and return the exit status: the program's; 1 if the ranks disagree or a budget is exceeded; 3 if they
    were stuck; 130 or 143 if interrupted. Under torchrun each process runs its rank, and rank 0 prints for all."""
    kind = "module" if asked.module else "script"
    options = replace(asked.options, quiet=asked.format != "table")
    traced = trace_program(kind, asked.target, asked.arguments, asked.nproc, options, label(asked))
    if isinstance(traced, int):
        return traced
    over: list[str] = []
    more: list[str] = []
    status = traced.status or (STATUS[traced.verdict.kind] if traced.verdict else 1 if traced.errors else 0)
    try:
        over = budget.check(traced.program, map(budget.parse_budget, asked.fail_on))
    except ValueError as error:
        over = [str(error)]
    if asked.baseline and asked.update_baseline and not traced.status:
        baseline.update(asked.baseline, {label(asked): traced.program})
    elif asked.baseline:
        more = budget.compare(traced.program, baseline.read(asked.baseline)[label(asked)])
    agree, notes = traced.errors, [*traced.notes, *jax_note(asked, traced.program), *stray(asked)]
    traced = replace(traced, errors=[*traced.errors, *over, *more], notes=notes)
    checks = {"the ranks agree": agree, "budgets": over, "baseline": more}
    present(traced, checks, asked.format, asked.steps, asked.every)
    return status or int(bool(over or more))


def stray(asked: Request) -> list[str]:
    """A line for each option of the command that stands after a script which does not mention it."""
    with suppress(OSError):  # of a module it is not known what it reads
        text = Path(asked.target).read_text(errors="replace")
        words = {word.partition("=")[0] for word in asked.arguments}
        names = [name for name in OPTIONS if name in words and name not in text and name.strip("-") not in text]
        return [f"{name} was given to {asked.target}; an option of shardiff stands before it" for name in names]
    return []


def jax_note(asked: Request, program: Program) -> list[str]:
    """What to do where the program communicates by JAX, which the tracer does not see."""
    with suppress(OSError, ImportError, ValueError, AttributeError):
        spec = find_spec(asked.target) if asked.module and "." not in asked.target else None
        path = Path(spec.origin or "") if spec else Path(asked.target)
        text = path.read_text(errors="replace")
        if not program.records and re.search(r"^\s*(import jax|from jax)\b", text, re.MULTILINE):
            return [
                f"{path.name} uses JAX, whose collectives XLA derives when it compiles; trace sees torch.distributed. "
                "Write a function step(mesh) that returns (function, arguments), and run: "
                f"shardiff compile {path.name}:step --target cpu:8 --mesh dp=8"
            ]
    return []
