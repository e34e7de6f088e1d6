"""What `make gpu` does once everything that it imports is there."""

from __future__ import annotations

import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence

from benchmarks import terminal
from benchmarks.documents.gpu import Gpu
from benchmarks.documents.results_io import parse_as
from benchmarks.gpu import run
from benchmarks.gpu.parts import PARTS
from benchmarks.report import gpu as chapter
from benchmarks.report import markdown
from benchmarks.report import sections as report_sections
from shardiff.system import machine
from shardiff.system.files import Document, unwritable, write

BUDGETS = {"cuda": 465.0, "cpu": 1400.0}  # seconds; a GPU may be there for ten minutes
FACTS = "import json, sys; from benchmarks.gpu import cuda; print(json.dumps(cuda.facts(sys.argv[1])))"


def answer(options: Namespace, added: Sequence[str]) -> int:
    """Run, write and print; the exit status. Raises ValueError, one line, for a wrong input."""
    check(options)
    budget = options.budget or BUDGETS[options.device]
    document = run.begin(options.device)
    document["gpu"] = facts(options.device)

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if added:
        tell(f"from {options.wheels}: {', '.join(added)}")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run.measure(document, options.output, budget, options.part, tell)
    finally:
        signal.signal(signal.SIGTERM, before)
        result = parse_as(Gpu, document)
        write(options.output / "gpu.md", page(result))
    terminal.show(
        [*chapter.summary(result), machine.summary(document["machine"]), f"{options.output}/gpu.json, gpu.md"]
    )
    incomplete = any(part.status != "done" for part in result.parts if part.name in options.part or not options.part)
    return 1 if not result.holds else 3 if incomplete else 0


def check(options: Namespace) -> None:
    """Raises ValueError for options that cannot work, and where there is no GPU."""
    for name in options.part:
        if name not in PARTS:
            raise ValueError(f"unknown part {name!r}; known: {', '.join(PARTS)}")
    if options.budget is not None and not 1 <= options.budget < 86400:
        raise ValueError(f"budget must be a number of seconds, 1 to 86400, got {options.budget:g}")
    if options.device == "cuda" and machine.num_gpus() == 0:
        raise ValueError("device cuda needs an NVIDIA GPU, and this machine has none; to rehearse: --device cpu")
    options.output = options.output.resolve()
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{options.output}: {error.strerror}") from None
    if reason := unwritable(options.output / "gpu.json"):
        raise ValueError(f"{options.output}: cannot be written: {reason}")


def facts(device: str) -> Document:
    """Facts of the GPU, from a process of its own: this one must not start CUDA. What it cannot say is left out."""
    import json

    done = subprocess.run(
        [sys.executable, "-c", FACTS, device],
        cwd=run.ROOT,
        env=run.environment(device),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr.strip().splitlines()[-1][:300]}


def page(result: Gpu) -> str:
    """The summary page, in Markdown."""
    section = report_sections.section("gpu", result)
    return markdown.page("shardiff: make gpu", [], [section], "All figures are in gpu.json; docs/gpu.md explains them.")
