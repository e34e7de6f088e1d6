"""What a checkout adds to the command: check, bench, report, plan, and the diff of strategies.

`shardiff.cli.checkout` finds this file beside the package. Commands only: each imports what it runs when it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.bubbles.command import bubbles
from benchmarks.collectives.command import collectives
from benchmarks.diff import diff
from benchmarks.experts.command import experts
from benchmarks.lesson.command import lesson
from benchmarks.options import (
    CHUNKS,
    DEVICE,
    JSON,
    MICROBATCHES,
    RECOMPUTE,
    RESHARD,
    SCHEDULE,
    reshard_of,
)
from benchmarks.plan.command import plan
from benchmarks.problem_options import takes_problem
from benchmarks.report.command import report
from benchmarks.steps.command import steps
from shardiff.cli.answers import TIMEOUT, refuse, repeatable

if TYPE_CHECKING:
    from contract.problem import Problem
    from contract.strategy import Run


def register(app: typer.Typer) -> None:
    """Add the commands to the application. A command of the same name gives way."""
    app.command()(check)
    app.command()(diff)
    app.add_typer(bench, name="bench")
    app.command()(report)
    app.command()(lesson)
    app.command()(plan)


@takes_problem
def check(
    problem: Problem,
    implementation: Annotated[
        list[str] | None, repeatable("NAME", "torch, shard_map or annotated. Default: all three.")
    ] = None,
    strategy: Annotated[
        list[str] | None,
        repeatable(
            "NAME",
            "data_parallel, tensor_parallel, megatron_tensor_parallel, pipeline_parallel, fully_sharded, zero1, zero2 "
            "or single_device; of a transformer also sequence_parallel, context_parallel, ring_attention, ulysses and "
            "expert_parallel, but not tensor_parallel. Default: all but single_device.",
        ),
    ] = None,
    degree: Annotated[
        list[int] | None, repeatable("N", "Number of ranks. Default: 4, and 1 for single_device.")
    ] = None,
    mesh: Annotated[
        list[str] | None,
        repeatable(
            "AXIS=N,...",
            "Axes of a mesh, outermost first, such as dp=2,tp=2. Each axis has its usual strategy (dp data_parallel, "
            "fsdp fully_sharded, tp megatron_tensor_parallel, pp pipeline_parallel, cp ring_attention, "
            "ep expert_parallel) or the one that --strategy names.",
        ),
    ] = None,
    dtype: Annotated[list[str] | None, repeatable("NAME", "float64, float32 or bfloat16. Default: float32.")] = None,
    optimizer: Annotated[list[str] | None, repeatable("NAME", "sgd or adamw. Default: adamw.")] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Number of training steps.")] = 3,
    microbatches: Annotated[int, MICROBATCHES] = 4,
    schedule: Annotated[str, SCHEDULE] = "gpipe",
    chunks: Annotated[int, CHUNKS] = 2,
    reshard: Annotated[str | None, RESHARD] = None,
    recompute: Annotated[str, RECOMPUTE] = "none",
    device: Annotated[str, DEVICE] = "auto",
    timeout: Annotated[float, TIMEOUT] = 30.0,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Train with every strategy and implementation, and show how far each result is from the single-device reference.

    Exit status: 1 if a result differs by more than rounding explains.
    """
    from benchmarks import check as checking
    from benchmarks import memory_limit
    from benchmarks.problems import words
    from shardiff.system import environment, memory

    try:
        runs = checking.plan(
            implementation or (),
            strategy or (),
            degree or (),
            dtype or ("float32",),
            optimizer or ("adamw",),
            problem,
            mesh or (),
            steps=steps,
            microbatches=microbatches,
            schedule=schedule,
            chunks=chunks,
            reshard=reshard_of(reshard),
            recompute=recompute,
            device=device,
        )
    except ValueError as error:
        refuse(str(error))
    if not 0 < timeout < float("inf"):
        refuse(f"timeout must be a number of seconds above 0, got {timeout}")
    if device == "cuda":
        from shardiff.system.machine import num_gpus

        most = max(run.world_size for run in runs)
        if num_gpus() < most:
            refuse(f"device cuda needs a GPU for each rank: degree {most}, GPUs {num_gpus()}; try --device cpu")
    try:
        memory_limit.require_processes(runs)
        memory.require(memory_limit.of_check(runs), words(runs[0].problem))
        environment.check(jax=any(run.implementation != "torch" for run in runs))
    except ValueError as error:
        refuse(str(error))
    raise typer.Exit(answer_check(runs, timeout, json))


def answer_check(runs: Sequence[Run], timeout: float, as_json: bool) -> int:
    """Run, and print the table or the JSON; the exit status. What was finished before a run failed is shown too."""
    from benchmarks import check as checking
    from benchmarks import check_view, terminal

    checked: list[checking.Row] = []
    failed = None
    speaks = checking.torchrun_ranks() is None or os.environ["RANK"] == "0"  # torchrun's ranks have the same results
    with terminal.progress(len(runs), silent=not speaks) as update:
        try:
            for row in checking.rows(runs, timeout, lambda run: update(description=checking.label(run))):
                checked.append(row)
                update(completed=len(checked))
        except checking.RunFailed as error:
            failed = error
    if checked and (speaks or failed):
        if not as_json:
            terminal.show(check_view.parts(checked, terminal.console().width))
        elif not failed:
            terminal.show_json(checking.document(checked))
    if failed:
        print(failed.report.rstrip(), file=sys.stderr)
        print("shardiff:", failed, file=sys.stderr)
        return 3
    return 0 if all(row.proof.passed for row in checked) else 1


bench = typer.Typer(
    help="Measure both frameworks in one run, and print the machine and the method beside every figure."
)
bench.command()(collectives)
bench.command()(steps)
bench.command()(bubbles)
bench.command()(experts)
