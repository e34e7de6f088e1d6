"""The command `shardiff`. Commands only: each imports what it runs when it runs, so that help and refusals are instant.

Exit status: 0 all holds; 1 something compared differs; 2 wrong input, told in one line before anything starts; 3 a
worker failed, and its own error comes first; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from benchmarks.interrupt import reliable_interrupts

app = typer.Typer(
    help="Parallel training in torch.distributed and in JAX: proven equal, and its communication compared.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. argv: without the program's name; by default the process's own."""
    _open_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with reliable_interrupts():
            status = app(arguments, prog_name="shardiff", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        message = getattr(error, "format_message", None)  # what every usage error of click's has, wherever it lives
        if message is None:
            raise
        return _complain(f"{message().rstrip('.')}; see shardiff --help")
    return status if isinstance(status, int) else 0


def _open_closed_streams() -> None:
    """Give a process started without stdout or stderr a place to write, lest a file or socket take the number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)


def _complain(message: str) -> int:
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


def _choice(metavar: str, text: str) -> Any:  # an option that may be repeated; contract.strategy knows its values
    return typer.Option(metavar=metavar, help=f"{text} Repeatable.")


@app.command()
def check(
    implementation: Annotated[
        list[str] | None, _choice("NAME", "torch, shard_map or annotated. All three by default.")
    ] = None,
    strategy: Annotated[
        list[str] | None,
        _choice(
            "NAME",
            "data_parallel, tensor_parallel, megatron_tensor_parallel, pipeline_parallel or single_device. "
            "The four parallel ones by default.",
        ),
    ] = None,
    degree: Annotated[list[int] | None, _choice("N", "Number of ranks. 4 by default, 1 for single_device.")] = None,
    dtype: Annotated[list[str] | None, _choice("NAME", "float64, float32 or bfloat16. float32 by default.")] = None,
    optimizer: Annotated[list[str] | None, _choice("NAME", "sgd or adamw. adamw by default.")] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps.")] = 3,
    batch: Annotated[int, typer.Option(metavar="N", help="Samples in a step, over all ranks.")] = 128,
    width: Annotated[int, typer.Option(metavar="N", help="Width of every layer.")] = 1024,
    layers: Annotated[int, typer.Option(metavar="N", help="Layers.")] = 4,
    microbatches: Annotated[int, typer.Option(metavar="N", help="Microbatches of pipeline_parallel.")] = 4,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cpu, cuda, or auto: CUDA where there are as many GPUs as ranks.")
    ] = "auto",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="A worker that is silent for longer counts as stuck.")
    ] = 120.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train with every strategy and implementation; show how far each is from the single-device reference."""
    from benchmarks import check as checking
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
    raise typer.Exit(checking.show(runs, timeout, json))


if __name__ == "__main__":
    sys.exit(main())
