"""The command `shardiff diff` of a checkout: strategies, and two programs as the tool compares them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.options import (
    CHUNKS,
    DTYPE,
    MICROBATCHES,
    RECOMPUTE,
    RESHARD,
    SCHEDULE,
    reshard_of,
)
from benchmarks.problem_options import takes_problem
from shardiff.cli.answers import TIMEOUT, check_timeout, one_of, refuse, repeatable

if TYPE_CHECKING:
    from contract.problem import Problem
    from contract.strategy import Run


@takes_problem
def diff(
    problem: Problem,
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STRATEGY... | LEFT RIGHT",
            help="Strategies; or two programs, each a .json of shardiff's, HLO text, FILE.py:FUNCTION, or SCRIPT.py.",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        repeatable("NAME:SIZE", "Hardware to compile for, such as cpu:8, h100:2x8 or v5e:2x4. Default: cpu:4."),
    ] = None,
    implementation: Annotated[
        str, typer.Option(metavar="NAME", help="JAX implementation that XLA compiles: annotated or shard_map.")
    ] = "annotated",
    degree: Annotated[
        int | None, typer.Option(metavar="N", help="Number of ranks. Default: all devices of the target.")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=N,...",
            help="Axes of one mesh, outermost first, such as dp=2,tp=4. The strategies are those of the axes.",
        ),
    ] = None,
    left_target: Annotated[str | None, typer.Option(metavar="NAME:SIZE", help="Of LEFT, a FILE.py:FUNCTION.")] = None,
    right_target: Annotated[str | None, typer.Option(metavar="NAME:SIZE", help="Of RIGHT.")] = None,
    nproc: Annotated[int | None, typer.Option(metavar="N", help="Processes of a SCRIPT.py that is traced.")] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="K", help="Which training step of a traced run; the last by default. 0: all of it."),
    ] = None,
    left_mesh: Annotated[
        str | None,
        typer.Option(metavar="AXIS=N,...", help="Mesh of the ranks of LEFT, outermost axis first: dp=2,tp=4."),
    ] = None,
    right_mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=N,...",
            help="Mesh of the ranks of RIGHT. With both meshes, axes of the same name are the same ranks.",
        ),
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="NAME", help="Precision of matrix products: default (as in a plain jit) or highest.")
    ] = "default",
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="Exit with status 1 if there are unexplained rows (unexplained) or extra bytes (extra-bytes).",
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the bytes to this file, or to one for each strategy.")
    ] = None,
    microbatches: Annotated[int, MICROBATCHES] = 4,
    schedule: Annotated[str, SCHEDULE] = "gpipe",
    chunks: Annotated[int, CHUNKS] = 2,
    reshard: Annotated[str | None, RESHARD] = None,
    recompute: Annotated[str, RECOMPUTE] = "none",
    spelling: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How fully_sharded is annotated (and of a transformer tensor, sequence and expert parallel): best, or "
            "naive, which states how the parameters are split, and little else.",
        ),
    ] = "best",
    dtype: Annotated[str, DTYPE] = "float32",
    timeout: Annotated[float, TIMEOUT] = 30.0,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one line with one object for each strategy and target.")
    ] = False,
) -> None:
    """Compare the communication written in torch with what XLA derives, for hardware that need not be here.

    Given two files, compare the programs in them.
    """
    from benchmarks import diff_strategies as diffing
    from benchmarks import memory_limit
    from benchmarks.problems import words
    from contract.axes import ON_AXES
    from shardiff.cli import diff as of_programs
    from shardiff.system import environment, memory
    from shardiff.system.files import check_path

    try:
        one_of("precision", precision, ("default", "highest"))
        if fail_on is not None:
            one_of("fail-on", fail_on, ("unexplained", "extra-bytes"))
        what = what or []
        if not what and mesh is None:
            raise ValueError("give a strategy, a --mesh, or two files")
        problem = replace(problem, dtype=dtype)
        rest: dict[str, Any] = {"microbatches": microbatches, "schedule": schedule, "chunks": chunks}
        rest |= {"reshard": reshard_of(reshard), "spelling": spelling, "recompute": recompute}
        if len(what) == 2 and not set(what) <= set(ON_AXES):
            first = target[0] if target else None
            targets, meshes = (left_target or first, right_target or first), (left_mesh or mesh, right_mesh or mesh)
            made: dict[str, Any] = {}
            for word, axes in zip(what, meshes, strict=True):
                if word in ON_AXES:
                    ranks = None if axes else degree or nproc
                    ((run, _),) = diffing.plan([word], implementation, ranks, axes, (), problem, **rest)
                    made[word] = functools.partial(diffing.written, run, timeout)
            pair = of_programs.plan(what, targets, meshes, nproc, step, fail_on, made)
            raise typer.Exit(of_programs.run(pair, bool(left_mesh and right_mesh), fail_on, json))
        if left_mesh or right_mesh or left_target or right_target or nproc is not None or step is not None:
            raise ValueError("--left-..., --right-..., --nproc and --step are for two programs that are no strategies")
        check_path("picture", picture, ".png")
        check_timeout(timeout)
        pairs = diffing.plan(what, implementation, degree, mesh, target or (), problem, **rest)
        memory.require(memory_limit.of_diff([run for run, _ in pairs]), words(pairs[0][0].problem))
        environment.check(jax=True)
        raise typer.Exit(answer_diff(pairs, precision, fail_on, picture, json, timeout))
    except ValueError as error:
        refuse(str(error))


def answer_diff(
    pairs: Sequence[tuple[Run, Any]],
    precision: str,
    fail_on: str | None,
    picture: Path | None,
    as_json: bool,
    timeout: float,
) -> int:
    """Compute the diffs, print them as tables or as one line of JSON each, and draw; the exit status.

    Raises ValueError for what cannot be compiled.
    """
    import json

    from benchmarks import diff_strategies, diff_view, terminal

    with terminal.progress() as update:
        diffs = diff_strategies.compute(pairs, precision, lambda text: update(description=text), timeout)
    for one in diffs:
        if as_json:
            print(json.dumps(one.to_json()))
        else:
            terminal.show(diff_view.parts(one), width=140)
    if picture is not None:
        diff_view.pictures(diffs, picture)
    return int(any(one.diff.fails(fail_on) for one in diffs))
