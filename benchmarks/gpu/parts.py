"""The parts of `make gpu` in order of value, and the process that runs one.

    python -m benchmarks.gpu.parts NAME DEVICE FILE.json

A part is a function of the sizes and of `keep`, which writes what has been reached so far. Parts of a wave run at the
same time, those that are timed alone.
"""

from __future__ import annotations

import importlib
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.sizes import of
from shardiff.system.files import write
from shardiff.system.processes import when_parent_ends


@dataclass(frozen=True)
class Part:
    """name: also of its file. does: what it shows. where: module and function. seconds: at most, on a GPU."""

    name: str
    does: str
    where: tuple[str, str]
    seconds: int

    def limit(self, device: str) -> int:
        """Seconds that it may take; more in a rehearsal, whose machine may be a small one that does other things."""
        return self.seconds if device == "cuda" else 3 * self.seconds


WAVES = (
    (
        Part("torch_alone", "torch equals the reference, one rank", ("proofs", "torch_alone"), 110),
        Part("shard_map_alone", "shard_map equals the reference, one rank", ("proofs", "shard_map"), 130),
        Part("annotated_alone", "annotated equals the reference, one rank", ("proofs", "annotated"), 130),
        Part("torch_shared", "torch equals the reference, 2 and 4 ranks on one GPU", ("proofs", "torch_shared"), 130),
    ),
    (
        Part("tests", "pytest -m gpu", ("suite", "on_gpu"), 110),
        Part("compiled", "programs for this device and for the h200 target", ("programs", "one_device"), 60),
    ),
    (Part("torch_steps", "steps of torch and its rates", ("steps_torch", "measure"), 110),),
    (Part("jax_steps", "steps of JAX and its rates", ("steps_jax", "measure"), 75),),
    (Part("floors", "copies and collectives of one rank", ("floors", "measure"), 40),),
    (Part("one_of_many", "one rank of a program of many, without its peers", ("programs", "one_of_many"), 90),),
)
PARTS = {part.name: part for wave in WAVES for part in wave}


def run(part: Part, device: str, file: Path) -> None:
    """Run a part in this process; `file` always holds what it has reached."""

    def keep(reached: dict[str, Any]) -> None:
        write(file, reached)

    module, function = part.where
    getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(of(device), keep)


if __name__ == "__main__":
    when_parent_ends(signal.SIGKILL)
    run(PARTS[sys.argv[1]], sys.argv[2], Path(sys.argv[3]))
