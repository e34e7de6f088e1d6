"""The command `shardiff bench experts`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.options import DEVICE, DTYPE, JSON, OUTPUT
from benchmarks.problem_options import takes_problem
from shardiff.cli.answers import TIMEOUT, refuse, repeatable

if TYPE_CHECKING:
    from benchmarks.experts.experts import Plan
    from contract.problem import Problem


@takes_problem
def experts(
    problem: Problem,
    ranks: Annotated[list[int] | None, repeatable("N", "Number of ranks, one process each. Default: 2 and 4.")] = None,
    skew: Annotated[
        list[float] | None,
        repeatable("X", "Expert e is chosen about as often as (1 + e)^-X says. Default: 0, 0.5, 1 and 2."),
    ] = None,
    iterations: Annotated[int, typer.Option(metavar="N", help="Timed passes of each contestant.")] = 12,
    dtype: Annotated[str, DTYPE] = "float32",
    device: Annotated[str, DEVICE] = "auto",
    timeout: Annotated[float, TIMEOUT] = 30.0,
    output: Annotated[Path | None, OUTPUT] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Time expert parallel passes in torch where some experts are more popular than others.

    Exit status: 1 if ours and the library equivalent do not compute the same gradients.
    """
    from dataclasses import replace

    from benchmarks import memory_limit
    from benchmarks.experts import experts as measuring
    from benchmarks.problems import with_experts, words
    from contract.axes import one_axis
    from contract.strategy import Run
    from shardiff.system import environment, memory
    from shardiff.system.files import check_path

    try:
        problem = with_experts(replace(problem, dtype=dtype), ("expert_parallel",))
        plan = measuring.plan(problem, ranks or (2, 4), skew or (0, 0.5, 1, 2), iterations, device, timeout)
        check_path("output", output, ".json")
        runs = [Run("torch", one_axis("expert_parallel", n), plan.problem, microbatches=1) for n in plan.ranks]
        memory_limit.require_processes(runs)
        contestants = 3 * len(plan.skews)
        memory.require(memory_limit.of_steps([(run, contestants) for run in runs]), words(plan.problem))
        environment.check(jax=False)
    except ValueError as error:
        refuse(str(error))
    raise typer.Exit(answer(plan, output, json))


def answer(plan: Plan, output: Path | None, as_json: bool) -> int:
    """Measure, and print a table or JSON; the exit status."""
    from benchmarks import bench, terminal
    from benchmarks.documents.experts import Imbalance
    from benchmarks.documents.results_io import parse_as
    from benchmarks.experts import experts as measuring
    from benchmarks.experts import view

    document, placed = bench.measured(lambda save, starting: measuring.measure(plan, save, starting), output, None)
    result = parse_as(Imbalance, document)
    terminal.show_json(document) if as_json else terminal.show(view.parts(result))
    return (0 if result.holds else 1) if placed else 2
