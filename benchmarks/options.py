"""Options that several commands of the lesson have."""

from __future__ import annotations

import typer

TRUTH = {"true": True, "false": False}

BATCH = typer.Option(metavar="N", help="Samples in a step, over all ranks.")
WIDTH = typer.Option(metavar="N", help="Width of every layer.")
LAYERS = typer.Option(metavar="N", help="Number of layers.")
MICROBATCHES = typer.Option(metavar="N", help="Number of microbatches in pipeline_parallel.")
SCHEDULE = typer.Option(
    metavar="NAME", help="Order of a pipeline's passes: naive, gpipe, 1f1b, interleaved, zb_h1 or zb_v."
)
CHUNKS = typer.Option(metavar="N", help="Chunks of every stage, for the schedule interleaved.")
RESHARD = typer.Option(
    metavar="true|false",
    help="Whether fully_sharded frees a gathered layer after the forward pass and gathers it again. Default: true, but "
    "false in a pipeline, which uses a layer once for each microbatch.",
)
RECOMPUTE = typer.Option(
    metavar="NAME",
    help="What a transformer's backward pass computes again instead of keeping it: none; block, all but the input of a "
    "block; or selective, attention from q, k and v on.",
)
DTYPE = typer.Option(metavar="NAME", help="float64, float32 or bfloat16.")
DEVICE = typer.Option(
    metavar="NAME", help="cpu, cuda or auto. auto chooses CUDA if the machine has a GPU for every rank."
)
OUTPUT = typer.Option(metavar="FILE.json", help="Write the JSON to this file, again after every block.")
RESUME = typer.Option(
    "--resume", help="Keep the blocks that an interrupted run has left in --output, and measure the others."
)
JSON = typer.Option("--json", help="Print JSON instead of tables.")


def reshard_of(text: str | None) -> bool | None:
    """The value of --reshard. Raises ValueError, one line, for another word."""
    if text is not None and text not in TRUTH:
        raise ValueError(f"reshard is true or false, got {text!r}")
    return None if text is None else TRUTH[text]
