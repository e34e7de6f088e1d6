"""The command `shardiff`. Commands only: each imports what it runs when it runs, so that help and refusals are instant.

Exit status: 0 all holds; 1 something compared differs; 2 wrong input, told in one line before anything starts, or
output that cannot be written; 3 a worker failed, and its own error comes first; 130 interrupted; 141 nobody reads on.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from benchmarks import streams
from benchmarks.bench_cli import TIMEOUT, bench, check_timeout, one_of, repeatable
from benchmarks.interrupt import reliable_interrupts
from benchmarks.report_cli import report
from contract.processes import WorkerError

app = typer.Typer(
    help="Parallel training in torch.distributed and in JAX: proven equal, and its communication compared.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(bench, name="bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. argv: without the program's name; by default the process's own."""
    streams.prepare()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with reliable_interrupts():
            status = _command()(arguments, prog_name="shardiff", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):  # so typer and rich end when nobody reads on
            raise
        streams.drop_output()
        return 141
    except BrokenPipeError:
        streams.drop_output()
        return 141
    except OSError as error:  # a disk is full, a name too long, no process can be started: nothing of ours
        streams.drop_output()
        return _complain(f"{error.filename or 'output'}: {error.strerror or error}")
    except WorkerError as error:  # of either launcher
        report = str(error).strip()
        print(f"{report}\nshardiff: {report.splitlines()[0].rstrip(':')}", file=sys.stderr)
        return 3
    except RecursionError:
        return _complain("the input is nested too deep")
    except Exception as error:
        message = getattr(error, "format_message", None)  # what every usage error of click's has, wherever it lives
        if message is None:
            raise
        return _complain(f"{message().rstrip('.')}; see shardiff --help")
    return status if isinstance(status, int) else 0


@functools.cache
def _command() -> Any:
    if not os.environ.get("TERMINAL_WIDTH", "0").isdigit():
        del os.environ["TERMINAL_WIDTH"]  # typer takes it for a number
    return typer.main.get_command(app)


def _complain(message: str) -> int:
    with suppress(OSError):
        print("shardiff:", " ".join(message.split()), file=sys.stderr)
    return 2


def refuse(message: str) -> NoReturn:
    """End with status 2 and one line."""
    raise typer.Exit(_complain(message))


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print("shardiff", version("shardiff"))
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def check(
    implementation: Annotated[
        list[str] | None, repeatable("NAME", "torch, shard_map or annotated. All three by default.")
    ] = None,
    strategy: Annotated[
        list[str] | None,
        repeatable(
            "NAME",
            "data_parallel, tensor_parallel, megatron_tensor_parallel, pipeline_parallel or single_device. "
            "The four parallel ones by default.",
        ),
    ] = None,
    degree: Annotated[list[int] | None, repeatable("N", "Number of ranks. 4 by default, 1 for single_device.")] = None,
    dtype: Annotated[list[str] | None, repeatable("NAME", "float64, float32 or bfloat16. float32 by default.")] = None,
    optimizer: Annotated[list[str] | None, repeatable("NAME", "sgd or adamw. adamw by default.")] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps.")] = 3,
    batch: Annotated[int, typer.Option(metavar="N", help="Samples in a step, over all ranks.")] = 128,
    width: Annotated[int, typer.Option(metavar="N", help="Width of every layer.")] = 1024,
    layers: Annotated[int, typer.Option(metavar="N", help="Layers.")] = 4,
    microbatches: Annotated[int, typer.Option(metavar="N", help="Microbatches of pipeline_parallel.")] = 4,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cpu, cuda, or auto: CUDA where there are as many GPUs as ranks.")
    ] = "auto",
    timeout: Annotated[float, TIMEOUT] = 30.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train with every strategy and implementation; show how far each is from the single-device reference."""
    from benchmarks import check as checking
    from benchmarks import environment, memory_limit
    from contract.problem import Problem
    from contract.strategy import IMPLEMENTATIONS, STRATEGIES

    try:
        runs = checking.plan(
            implementation or IMPLEMENTATIONS,
            strategy or STRATEGIES,
            degree or (),
            dtype or ("float32",),
            optimizer or ("adamw",),
            Problem(batch, width, layers),
            steps=steps,
            microbatches=microbatches,
            device=device,
        )
    except ValueError as error:
        refuse(str(error))
    if not 0 < timeout < float("inf"):
        refuse(f"timeout must be a number of seconds above 0, got {timeout}")
    if device == "cuda":
        from benchmarks.machine import num_gpus

        most = max(run.degree for run in runs)
        if num_gpus() < most:
            refuse(f"device cuda needs a GPU for each rank: degree {most}, GPUs {num_gpus()}; try --device cpu")
    try:
        memory_limit.require_processes(runs)
        memory_limit.require(memory_limit.of_check(runs), memory_limit.describe(runs[0].problem))
        environment.check(jax=any(run.implementation != "torch" for run in runs))
    except ValueError as error:
        refuse(str(error))
    raise typer.Exit(checking.show(runs, timeout, json))


@app.command()
def diff(
    what: Annotated[
        list[str],
        typer.Argument(metavar="STRATEGY... | A.json B.json", help="Strategies, or two outputs of trace or hlo."),
    ],
    target: Annotated[
        list[str] | None, typer.Option(metavar="NAME:SIZE", help="cpu:8, h100:2x8, v5e:2x4, ... Repeatable.")
    ] = None,
    implementation: Annotated[
        str, typer.Option(metavar="NAME", help="annotated or shard_map: what XLA compiles.")
    ] = "annotated",
    degree: Annotated[int | None, typer.Option(metavar="N", help="Ranks. By default all devices of a target.")] = None,
    mesh: Annotated[str | None, typer.Option(metavar="AXIS=N", help="The same as a mesh: tp=8.")] = None,
    precision: Annotated[
        str, typer.Option(metavar="NAME", help="Of matrix products: default (a plain jit's) or highest.")
    ] = "default",
    fail_on: Annotated[
        str | None, typer.Option(metavar="WHAT", help="Exit with 1 on: unexplained, extra-bytes.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Write a picture of the bytes, for each strategy.")
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Samples in a step, over all ranks.")] = 128,
    width: Annotated[int, typer.Option(metavar="N", help="Width of every layer.")] = 1024,
    layers: Annotated[int, typer.Option(metavar="N", help="Layers.")] = 4,
    microbatches: Annotated[int, typer.Option(metavar="N", help="Microbatches of pipeline_parallel.")] = 4,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="float64, float32 or bfloat16.")] = "float32",
    timeout: Annotated[float, TIMEOUT] = 30.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line for each target.")] = False,
) -> None:
    """Compare the communication that torch code writes with what XLA derives, for hardware that need not be here."""
    from benchmarks import diff as diffing
    from benchmarks import environment, memory_limit
    from benchmarks.figures import check_path
    from contract.problem import Problem
    from contract.strategy import STRATEGIES

    try:
        one_of("precision", precision, ("default", "highest"))
        if fail_on is not None:
            one_of("fail-on", fail_on, ("unexplained", "extra-bytes"))
        if len(what) == 2 and not set(what) & set(STRATEGIES):
            raise typer.Exit(diffing.show_files(Path(what[0]), Path(what[1]), fail_on, json))
        check_path("picture", picture, ".png")
        problem = Problem(batch, width, layers, dtype)
        check_timeout(timeout)
        pairs = diffing.plan(what, implementation, degree, mesh, target or (), problem, microbatches)
        memory_limit.require(memory_limit.of_diff([run for run, _ in pairs]), memory_limit.describe(problem))
        environment.check(jax=True)
        raise typer.Exit(diffing.show(pairs, precision, fail_on, picture, json, timeout))
    except ValueError as error:
        refuse(str(error))


@app.command()
def hlo(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="HLO text, gzipped or not; - reads standard input.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line for each file.")] = False,
) -> None:
    """Show what compiled XLA programs communicate, from their HLO text. Needs neither jax nor the hardware."""
    from benchmarks import hlo_files

    raise typer.Exit(hlo_files.show(files, json))


app.command()(report)


@app.command()
def targets(json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """List the hardware that diff can compile for, and whether its compiler is installed here."""
    from benchmarks import target_list

    target_list.show(json)


@app.command(context_settings={"allow_interspersed_args": False})
def trace(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python file, run as it is.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.")] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", help="Processes, started as torchrun would. 1 by default.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every call over ranks before it blocks; stop where they disagree.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="With --verify, how long a rank may keep others waiting: 30 by default. "
            "Without, how long no rank may make a call: without a limit by default.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; the script's output goes to stderr.")] = False,
) -> None:
    """Run any torch script and show what its ranks send: every call, merged over ranks, by phase and source line.

    Exit status: the script's own; instead of 0, 1 where ranks disagree or wait for each other, 3 where one is stuck.
    """
    from benchmarks import memory_limit, trace_script

    try:
        memory_limit.require((nproc or 1) * memory_limit.PROCESS, f"a script in {nproc} processes")
    except ValueError as error:
        refuse(str(error))
    if problem := trace_script.refusal(script, nproc, verify, timeout):
        refuse(problem)
    raise typer.Exit(trace_script.show(script, arguments or [], nproc, json, verify, timeout))


if __name__ == "__main__":
    sys.exit(main())
