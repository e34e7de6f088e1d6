"""The command `shardiff`. Commands only: each imports what it runs when it runs, so that help and refusals are instant.

Exit status: 0 all holds; 1 something compared differs; 2 wrong input, told in one line before anything starts, or
output that cannot be written; 3 a worker failed, and its own error comes first; 130 interrupted; 141 nobody reads on.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shardiff.cli import checkout
from shardiff.cli.answers import complain, refuse, repeatable
from shardiff.ranks.verdict import WorkerError
from shardiff.system import streams
from shardiff.system.extras import EXTRAS, MissingExtra, missing
from shardiff.system.interrupt import reliable_interrupts

app = typer.Typer(
    help="What a distributed training program communicates, in torch.distributed and in JAX, and how two differ.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Options of trace and compile.
Budgets = Annotated[list[str] | None, repeatable("BUDGET", "Exit with 1 where this is exceeded: 'all_gather > 1MB'.")]
Baseline = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Exit with 1 where there is more than this file has.")
]
UpdateBaseline = Annotated[bool, typer.Option("--update-baseline", help="Write the baseline instead.")]


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
        return complain(f"{error.filename or 'output'}: {error.strerror or error}")
    except WorkerError as error:  # of either launcher
        report = str(error).strip()
        print(f"{report}\nshardiff: {report.splitlines()[0].rstrip(':')}", file=sys.stderr)
        return 3
    except ModuleNotFoundError as error:
        if not isinstance(error, MissingExtra):
            if (package := (error.name or "").partition(".")[0]) not in EXTRAS:
                raise
            error = missing(arguments[0], package)
        return complain(str(error))
    except RecursionError:
        return complain("the input is nested too deep")
    except Exception as error:
        message = getattr(error, "format_message", None)  # what every usage error of click's has, wherever it lives
        if message is None:
            raise
        return complain(f"{message().rstrip('.')}; see shardiff --help")
    return status if isinstance(status, int) else 0


@functools.cache
def _command() -> Any:
    if not os.environ.get("TERMINAL_WIDTH", "0").isdigit():
        del os.environ["TERMINAL_WIDTH"]  # typer takes it for a number
    return typer.main.get_command(app)


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
def hlo(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="HLO text, gzipped or not; - reads standard input.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line for each file.")] = False,
) -> None:
    """Show what compiled XLA programs communicate, from their HLO text. Needs neither jax nor the hardware."""
    from shardiff.cli import hlo as hlo_files

    raise typer.Exit(hlo_files.show(files, json))


@app.command()
def targets(json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """List the hardware that compile and diff can compile for, and whether its compiler is installed here."""
    from shardiff.cli import targets as target_list

    target_list.show(json)


@app.command()
def compile(
    function: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION", help="Called with a mesh, it returns (function, args) or a jax.stages.Lowered."
        ),
    ],
    target: Annotated[list[str] | None, repeatable("NAME:SIZE", "cpu:8, h100:2x8, v5e:4x4, ...")] = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXIS=N,...", help="The axes, outermost first: dp=4,tp=4. -1: what the others leave."),
    ] = None,
    fail_on: Budgets = None,
    baseline: Baseline = None,
    update_baseline: UpdateBaseline = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line for each target.")] = False,
) -> None:
    """Compile a JAX function of yours for hardware that need not be here, and show what it communicates.

    Exit status: 1 where a budget or the baseline is exceeded, 3 where the file's own code raised an error.
    """
    from shardiff.cli import compile as compiling
    from shardiff.system.extras import require

    require("compile", "jax")
    try:
        plan = compiling.plan(function, target or (), mesh, fail_on or (), baseline, update_baseline)
        raise typer.Exit(compiling.show(plan, json))
    except ValueError as error:
        refuse(str(error))


@app.command(context_settings={"allow_interspersed_args": False})
def trace(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, run as it is; with -m, a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run a module, as python -m does.")] = False,
    nproc: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Processes, as torchrun starts them; 1 by default. 0: one as Python does, which starts its own ranks.",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every call over ranks before it blocks; stop where they disagree.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Verify, and stop also where ranks meet in one collective with different parameters, or from "
            "different lines; without it that is a warning.",
        ),
    ] = False,
    values: Annotated[
        bool,
        typer.Option(
            "--values",
            help="Compare replicas bit by bit: results of all_reduce, all_gather and broadcast, and DDP's parameters "
            "at the start and after each step. The first that differs is named.",
        ),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long all ranks may be idle without making a call: 300 by default. Ranks that compute are not "
            "idle. With --verify, how long a rank may keep others waiting: 30 by default.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tell the first N training steps one by one, set-up and the rest apart."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show each record of a large program, not a summary.")] = False,
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="table, json, csv, markdown, perfetto, github or junit; but for table, the script prints to stderr.",
        ),
    ] = "table",
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    fail_on: Budgets = None,
    baseline: Baseline = None,
    update_baseline: UpdateBaseline = False,
) -> None:
    """Run any torch program and show what its ranks send: every call, merged over ranks, by phase and source line.

    Exit status: the program's own; instead of 0, 1 where ranks disagree or wait for each other, or a budget or the
    baseline is exceeded, 3 where a rank is stuck.
    """
    from shardiff.system import memory
    from shardiff.system.extras import require

    require("trace", "torch")
    from shardiff.cli import trace as trace_script
    from shardiff.tracing.traced import Options

    try:
        memory.require((nproc or 1) * memory.PROCESS, f"a script in {nproc} processes")
    except ValueError as error:
        refuse(str(error))
    asked = trace_script.Request(
        script,
        arguments or [],
        module,
        nproc,
        Options(verify or strict, strict, values, timeout),
        "json" if json else format,
        steps,
        every,
        fail_on or (),
        baseline,
        update_baseline,
    )
    if problem := trace_script.refusal(asked):
        refuse(problem)
    raise typer.Exit(trace_script.show(asked))


@app.command()
def diff(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="LEFT RIGHT", help="Each: a .json of shardiff's, HLO text, FILE.py:FUNCTION, or SCRIPT.py."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME:SIZE", help="What FILE.py:FUNCTION is compiled for: h100:8, v5e:2x4, ..."),
    ] = None,
    left_target: Annotated[str | None, typer.Option(metavar="NAME:SIZE", help="That of the left side alone.")] = None,
    right_target: Annotated[str | None, typer.Option(metavar="NAME:SIZE", help="That of the right side alone.")] = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXIS=N,...", help="The axes of both sides' ranks, outermost first: dp=2,tp=4."),
    ] = None,
    left_mesh: Annotated[str | None, typer.Option(metavar="AXIS=N,...", help="Those of the left side.")] = None,
    right_mesh: Annotated[
        str | None,
        typer.Option(metavar="AXIS=N,...", help="Of the right side. With both, axes of equal names and lengths agree."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", help="Processes of SCRIPT.py, which is traced. 2 by default.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="K", help="Which training step of a traced run; the last by default. 0: all of it."),
    ] = None,
    fail_on: Annotated[
        str | None, typer.Option(metavar="WHAT", help="Exit with 1 on: unexplained, extra-bytes.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare what two programs communicate: files, JAX functions that are compiled, torch scripts that are traced.

    Exit status: 1 for what --fail-on names, 3 where a function raised; a script's own where it failed.
    """
    from shardiff.cli import diff as diffing

    targets, meshes = (left_target or target, right_target or target), (left_mesh or mesh, right_mesh or mesh)
    if not checkout.here() and (named := [word for word in what if word.isidentifier() and not Path(word).exists()]):
        refuse(checkout.where(f"diff {named[0]}"))
    try:
        pair = diffing.plan(what, targets, meshes, nproc, step, fail_on)
        raise typer.Exit(diffing.run(pair, bool(left_mesh and right_mesh), fail_on, json))
    except ValueError as error:
        refuse(str(error))


checkout.register(app)
