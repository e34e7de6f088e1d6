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
from shardiff.cli.answers import complain, refuse
from shardiff.ranks.verdict import WorkerError
from shardiff.system import streams
from shardiff.system.interrupt import reliable_interrupts

app = typer.Typer(
    help="Parallel training in torch.distributed and in JAX: proven equal, and its communication compared.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    """List the hardware that diff can compile for, and whether its compiler is installed here."""
    from shardiff.cli import targets as target_list

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
    from shardiff.cli import trace as trace_script
    from shardiff.system import memory

    try:
        memory.require((nproc or 1) * memory.PROCESS, f"a script in {nproc} processes")
    except ValueError as error:
        refuse(str(error))
    if problem := trace_script.refusal(script, nproc, verify, timeout):
        refuse(problem)
    raise typer.Exit(trace_script.show(script, arguments or [], nproc, json, verify, timeout))


checkout.register(app)
