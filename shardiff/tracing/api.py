"""`shardiff.trace`, `shardiff.tracing` and `shardiff.step`: what a torch program communicates, asked from Python."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardiff.program import Program
from shardiff.tracing.calls import Call
from shardiff.tracing.merge import MismatchError, disagreements, program_of
from shardiff.tracing.sending import sendable
from shardiff.tracing.traced import Options, trace_program
from shardiff.tracing.tracer import capture, mark_step

PATIENCE = 60.0  # seconds in which the other ranks have to leave their `with`


class TraceError(RuntimeError):
    """A traced function has failed on a rank, or was stopped. The message is one line; the rank's own traceback is on
    standard error."""


def trace(
    function: Callable[..., Any],
    *args: Any,
    nproc: int = 2,
    verify: bool = False,
    strict: bool = False,
    values: bool = False,
    timeout: float | None = None,
) -> Program:
    """What function(*args) communicates, run on `nproc` ranks as torchrun would start them, merged over the ranks.

    Each rank is a fresh process on this machine, with torchrun's environment and a process group of all ranks, unless
    the function makes one of its own. What it returns is dropped. The function and its arguments are sent to them: a
    function of a module by its name; one of a script or a notebook, a lambda or a function inside another by its code,
    with the variables that it uses.

    verify: compare every call over the ranks before it blocks. strict: and refuse calls that fit together but move
    different parameters or come from different lines, which are warned of otherwise. values: compare replicas bit by
    bit. timeout: seconds, see `Options`.

    Returns a Program: all records, and by training step its `segments`. Raises ValueError, one line, for what cannot be
    sent; MismatchError where the ranks disagree; TraceError where the function fails or a rank is stuck.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    if "RANK" in os.environ:
        raise ValueError("this process is a rank already: trace what it does by `with shardiff.tracing() as program:`")
    label = getattr(function, "__qualname__", type(function).__name__)
    content = sendable(function, args)
    with tempfile.TemporaryDirectory(prefix="shardiff-") as directory:
        file = Path(directory, "function.pickle")
        file.write_bytes(content)
        options = Options(verify or strict, strict, values, timeout)
        done = trace_program("function", str(file), (), nproc, options, label)
    assert not isinstance(done, int), "this process is no rank"
    if done.verdict and done.verdict.kind == "stuck":
        raise TraceError(f"{label}: {done.verdict.text}")
    if done.raised:
        rank, text = next(iter(done.raised.items()))  # the first to fail: others may have lost their peer
        raise TraceError(f"{label} failed on rank {rank}: {' '.join(text.split())}")
    if done.errors:
        raise MismatchError(done.errors, list(done.program.records))
    if done.status:
        raise TraceError(f"{label}: a rank ended with status {done.status}")
    for line in (*done.warnings, *done.notes):
        warnings.warn(f"{label}: {line}", stacklevel=2)
    return done.program


@contextmanager
def tracing(*, merge: bool = True) -> Iterator[Program]:
    """What this process communicates inside the `with`, as a Program that is filled when the `with` ends.

    Inside a process group of more than one rank it is then what all ranks communicate, merged: each hands its calls to
    rank 0 by way of the group's store, without a collective, and gets the whole. So all ranks should trace; where one
    does not come within a minute, this rank's own view remains, with a warning. With merge=False, and where the `with`
    ends by an exception, it is this rank's own view in any case. A receive is in that view a permute without bytes on
    this rank's wire.

    Raises MismatchError on leaving, on every rank, where the ranks disagree.
    """
    program = Program((), "this rank")
    calls: list[Call] = []
    try:
        with capture(first_phase="other") as calls:
            yield program
    except BaseException:
        _fill(program, own_view(calls))
        raise
    problems: list[str] = []
    found = own_view(calls)
    if merge and dist.is_initialized() and dist.get_world_size() > 1:
        ranks = _exchange(calls)
        if ranks is not None:
            problems = disagreements(ranks)
            found = program_of(ranks, f"{len(ranks)} ranks")
    _fill(program, found)
    if problems:
        raise MismatchError(problems, list(program.records))


def step() -> None:
    """Mark the end of a training step: what is traced is told per step then. Does nothing where nothing is traced.

    Without any mark, a step is one where an optimizer's step ends.
    """
    mark_step()


def own_view(calls: Sequence[Call]) -> Program:
    """One rank's calls as a Program, with its segments."""
    return program_of([calls], "this rank", alone=True)


def _fill(program: Program, found: Program) -> None:
    """Make the Program that was handed out before anything was known like the one that is known now."""
    for name in Program.__dataclass_fields__:
        object.__setattr__(program, name, getattr(found, name))


def _exchange(calls: Sequence[Call]) -> list[list[Call]] | None:
    """The calls of all ranks of the default group; None, with a warning, if they do not all come."""
    store: Any = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    number = store.add(f"shardiff/count/{rank}", 1)  # how many times this rank has traced
    store.set(f"shardiff/{number}/{rank}", json.dumps([call.to_json() for call in calls]))
    try:
        store.wait([f"shardiff/{number}/{other}" for other in range(size)], timedelta(seconds=PATIENCE))
    except dist.DistError:
        warnings.warn(f"not all ranks have traced: this is the view of rank {rank} alone", stacklevel=4)
        return None
    texts = [store.get(f"shardiff/{number}/{other}") for other in range(size)]
    return [[Call.from_json(fields) for fields in json.loads(text)] for text in texts]
