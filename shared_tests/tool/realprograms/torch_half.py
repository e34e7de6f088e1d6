"""The torch half of `make realprograms`: programs run on four ranks, and what torch itself says they called.

Of each it is checked, on every rank, that as many calls of each op are traced as CommDebugMode counts, where it can
see, and as the profiler has records of gloo; that all ranks agree; and that the busiest rank sends in a step after the
first what a formula says that was written by hand.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardiff.program import Program
from shardiff.ranks.torch_pool import workers
from shardiff.summary import summarize
from shardiff.system.machine import version
from shardiff.system.words import size
from shardiff.tracing.calls import Call
from shardiff.tracing.merge import disagreements, program_of
from shardiff.tracing.tracer import capture
from shared_tests.tool.realprograms import torch_libraries, torch_oracle, torch_programs
from shared_tests.tool.realprograms.torch_programs import RANKS, STEPS

PROGRAMS = {name: module for module in (torch_programs, torch_libraries) for name in module.PROGRAMS}


@dataclass(frozen=True)
class Result:
    """One program. skipped: why it could not be run; flaws: what is not as it should be, a line each."""

    file: str
    name: str
    formula: str
    program: Program
    flaws: tuple[str, ...]
    skipped: str | None
    seconds: float


def measure(names: Iterable[str]) -> Iterator[Result]:
    """Run the programs of these names. An error in one is an error of the campaign."""
    with workers(RANKS, "cpu") as pool:
        for name in names:
            yield measured(pool, name)


def measured(pool: Any, name: str) -> Result:
    """Run one program."""
    start = time.perf_counter()
    module = PROGRAMS[name]
    file, known = module.__name__.rpartition(".")[2], module.PROGRAMS[name]
    skipped = missing(known)
    ranks = [] if skipped else pool.call(observe, module.__name__, name, world_size=RANKS)
    program = program_of([calls for calls, *_ in ranks], name)
    flaws = () if skipped else tuple(check(program, ranks, known.wire_bytes))
    return Result(file, name, known.formula, program, flaws, skipped, time.perf_counter() - start)


def missing(known: Any) -> str | None:
    """Why a program cannot be run here."""
    package = getattr(known, "package", None)
    if package and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return None


def observe(device: Any, module: str, name: str) -> tuple[list[Call], dict[str, int], dict[str, int]]:
    """On a rank: the calls that are traced, those that CommDebugMode counts, and what gloo ran."""
    run = importlib.import_module(module).PROGRAMS[name].run
    with capture(first_phase="other") as calls:
        gloo = torch_oracle.by_profiler(run)
    return calls, dict(torch_oracle.by_comm_debug_mode(run)), dict(gloo)


def check(program: Program, ranks: Sequence[Any], wire_bytes: int) -> Iterator[str]:
    """What is not as it should be."""
    yield from disagreements([calls for calls, *_ in ranks])
    for rank, (calls, mode, gloo) in enumerate(ranks):
        for flaw in torch_oracle.flaws(calls, mode, gloo):
            yield f"rank {rank}: {flaw}"
    if len(program.steps) != STEPS:
        yield f"{len(program.steps)} steps are told of {STEPS}"
    elif (sent := busiest(program.steps[-1])) != wire_bytes:
        yield f"a rank sends {sent:,} bytes in a step, and should {wire_bytes:,}"


def busiest(step: Program) -> int:
    """The wire bytes that the busiest rank sends."""
    found = summarize(step).busiest
    return found.wire_bytes if found else step.wire_bytes


def report(results: Sequence[Result]) -> str:
    """The results as Markdown."""
    packages = ("torch", "accelerate", "lightning", "transformers")
    versions = ", ".join(f"{name} {version(name) or 'not installed'}" for name in packages)
    lines = [
        "## torch",
        "",
        f"Whole programs, run by `make realprograms` on {RANKS} ranks and traced: the calls of the last training step,",
        "and the wire bytes that the busiest rank must send in it, which are those of the formula. P: bytes of the",
        "parameters, A: of the activations, n: ranks, L: layers. The last column says whether every rank's trace of",
        "the whole program has as many calls of each op as CommDebugMode counts (which sees no messages), and as the",
        f"profiler has records of gloo. {versions}.",
        "",
        "| program | calls in a step | a rank sends | formula | as torch itself counts |",
        "|---|---|---|---|---|",
        *rows(results),
    ]
    return "\n".join(lines) + "\n"


def rows(results: Sequence[Result]) -> Iterator[str]:
    """Markdown."""
    for result in results:
        head = f"| [{result.file}.py]({result.file}.py):{result.name} "
        if result.skipped:
            yield f"{head}| skipped: {result.skipped} | | | |"
            continue
        step = result.program.steps[-1]
        calls = ", ".join(f"{count} {op}" for op, count in sorted(step.counts().items()))
        verdict = "; ".join(result.flaws) or "yes"
        yield f"{head}| {calls} | {size(busiest(step))} | {result.formula} | {verdict} |"
