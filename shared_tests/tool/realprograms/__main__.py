"""`make realprograms`: whole programs of JAX's libraries, compiled for three kinds of hardware, and of torch's, run.

Of each JAX program it is checked that as many collectives of each op are read as XLA's own parser sees, that every one
runs along an axis of the mesh, and that the totals by axis add up to the program's. Of the torch programs: see
`torch_half`. The result is `results.md` beside this file.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardiff.cli.compiled_view import by_axis
from shardiff.program import Program
from shardiff.system import files
from shardiff.system.machine import version
from shardiff.system.words import size
from shared_tests.tool.realprograms import oracle, torch_half

TARGETS = ("cpu:8", "h100:8", "v5e:2x4")
PROGRAMS: dict[tuple[str, str], dict[str, int]] = {
    ("flax_nnx", "data_parallel"): {"dp": 8},
    ("flax_nnx", "fully_sharded"): {"dp": 8},
    ("flax_nnx", "tensor_parallel"): {"tp": 8},
    ("flax_nnx", "both"): {"dp": 4, "tp": 2},
    ("flax_nnx", "scanned"): {"dp": 4, "tp": 2},
    ("flax_linen", "language_model"): {"dp": 2, "tp": 4},
    ("maxtext_style", "decoder"): {"dp": 4, "tp": 2},
    ("equinox_mlp", "data_parallel"): {"dp": 8},
    ("equinox_mlp", "fully_sharded"): {"dp": 8},
    ("equinox_mlp", "tensor_parallel"): {"tp": 8},
    ("equinox_mlp", "optimizer_sharded"): {"dp": 8},
    ("written", "experts"): {"ep": 8},
    ("written", "pipeline"): {"pp": 8},
    ("written", "ring_attention"): {"cp": 8},
}
BESIDE = Path(__file__).parent


@dataclass(frozen=True)
class Result:
    """One program on one target. flaws: what is not as it should be, a line each."""

    file: str
    function: str
    target: str
    program: Program
    flaws: tuple[str, ...]
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shared_tests.tool.realprograms", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--target", action="append", help=f"default: {', '.join(TARGETS)}")
    parser.add_argument("--output", type=Path, default=BESIDE / "results.md")
    options = parser.parse_args()
    results = []
    for result in measure(PROGRAMS, options.target or TARGETS):
        results.append(result)
        told = "; ".join(result.flaws) or "holds"
        print(f"{result.file}:{result.function} on {result.target}: {result.seconds:.1f} s; {told}", flush=True)
    of_torch = []
    for ran in torch_half.measure(torch_half.PROGRAMS):
        of_torch.append(ran)
        told = "; ".join(ran.flaws) or (f"skipped: {ran.skipped}" if ran.skipped else "holds")
        print(f"{ran.file}:{ran.name}: {ran.seconds:.1f} s; {told}", flush=True)
    files.write(options.output, f"{report(results)}\n{torch_half.report(of_torch)}")
    return int(any(result.flaws for result in (*results, *of_torch)))


def measure(programs: Iterable[tuple[str, str]], targets: Sequence[str]) -> Iterator[Result]:
    """Compile and read these programs for every target. An error in one is an error of the campaign."""
    import shardiff

    for file, function in programs:
        axes = PROGRAMS[file, function]
        module = importlib.import_module(f"{__package__}.{file}")
        for target in targets:
            start = time.perf_counter()
            step, args = getattr(module, function)(shardiff.mesh(target, **axes))
            compiled = lower(step, args).compile()
            program = shardiff.read(compiled)
            flaws = tuple(check(program, compiled.as_text(), axes))
            yield Result(file, function, target, program, flaws, time.perf_counter() - start)


def lower(step: Any, args: tuple[Any, ...]) -> Any:
    import jax

    return (step if hasattr(step, "lower") else jax.jit(step)).lower(*args)


def check(program: Program, text: str, axes: dict[str, int]) -> Iterator[str]:
    """What is not as it should be."""
    read, seen = Counter(record.op for record in program), oracle.collectives(text)
    if read != seen:
        yield f"read {dict(read)}, XLA's parser sees {dict(seen)}"
    if not program.records:
        yield "no communication"
    if program.mesh is None or dict(program.mesh.axes) != axes:
        yield f"the mesh is {program.mesh}"
    if lost := [record.name for record in program if record.axis is None]:
        yield f"along no axis: {lost}"
    if unknown := [record.name for record in program if record.executions.max is None]:
        yield f"runs nobody knows how often: {unknown}"
    if sum(sums["wire_bytes"]["min"] for sums in by_axis(program).values()) != program.wire_bytes:
        yield "the axes do not add up"


def report(results: Sequence[Result]) -> str:
    """The results as Markdown."""
    packages = ("jax", "flax", "optax", "equinox", "libtpu")
    versions = ", ".join(f"{name} {version(name) or 'not installed'}" for name in packages)
    lines = [
        "# Real programs",
        "",
        "## JAX",
        "",
        "Whole training steps, compiled by `make realprograms` for hardware that is not there: the calls and bytes",
        f"of a rank in one step. {versions}.",
        "",
        "| program | target | mesh | calls | a rank sends, by axis | memory of a device | as XLA's parser sees it |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        program = result.program
        calls = ", ".join(f"{count} {op}" for op, count in sorted(program.counts().items()))
        axes = ", ".join(f"{axis}: {size(sums['wire_bytes']['min'])}" for axis, sums in by_axis(program).items())
        held = size(sum(program.memory.get(kind, 0) for kind in ("arguments", "temporaries")))
        name = f"[{result.file}.py]({result.file}.py):{result.function}"
        verdict = "; ".join(result.flaws) or "yes"
        lines.append(f"| {name} | {result.target} | {program.mesh} | {calls} | {axes} | {held} | {verdict} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
