"""Run the parts, each in a process of its own, and write what was reached after each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from benchmarks.gpu.parts import WAVES, Part
from benchmarks.gpu.sizes import of
from shardiff.ranks.supervisor import end
from shardiff.system import machine
from shardiff.system.files import Document, keeper

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("triton", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "jax-cuda13-plugin", "jax-cuda12-plugin", "msgspec")
VARIABLES = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # parts share the GPU
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONUNBUFFERED": "1",
}
OF_DEVICE = {
    "cuda": {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")},
    "cpu": {
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",  # threads that wait for each other say nothing here
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # else torch.compile tries each vector unit in a process that imports torch
        # LLVM optimizes nothing, which takes most of the time. XLA's own passes run as always.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        + os.environ.get("XLA_FLAGS", ""),
    },
}


def begin(device: str) -> Document:
    """The document before anything has run: plain JSON types, whose keys stay."""
    sizes = of(device)
    problems = {name: asdict(getattr(sizes, name)) for name in ("proof", "proof_blocks", "step", "step_block")}
    settings = {"device": device, **problems, "mocked": sizes.mocked}
    waiting = [outcome(part, device, "not reached", 0.0, None, {}) for wave in WAVES for part in wave]
    return {
        "kind": "gpu",
        "schema": 1,
        "complete": False,
        "machine": machine.facts(),
        "gpu": {},
        "packages": {name: machine.version(name) for name in PACKAGES},
        "settings": settings,
        "parts": waiting,
    }


def outcome(part: Part, device: str, status: str, seconds: float, reason: str | None, reached: Document) -> Document:
    """What became of a part, as the document has it."""
    return {
        "name": part.name,
        "does": part.does,
        "status": status,
        "seconds": seconds,
        "limit_seconds": part.limit(device),
        "reason": reason,
        "reached": reached,
    }


def measure(
    document: Document,
    folder: Path,
    budget: float,
    only: Sequence[str] = (),
    tell: Callable[[str], object] = lambda line: None,
) -> Document:
    """Run all waves, or the parts named in `only`, within `budget` seconds; the document stands in folder/gpu.json."""
    keep, ends = keeper(folder / "gpu.json"), time.monotonic() + budget
    done = {part["name"]: part for part in document["parts"]}
    keep(document)
    for wave in WAVES:
        chosen = [part for part in wave if part.name in only or not only]
        for result in run_wave(chosen, document["settings"]["device"], folder, ends):
            done[result["name"]] = result
            document["parts"] = list(done.values())
            keep(document)
            tell(sentence(result))
    document["complete"] = all(part["status"] == "done" for part in done.values())
    keep(document)
    return document


def sentence(result: Document) -> str:
    """A line about a part that has ended."""
    reason = f": {result['reason'].splitlines()[-1]}" if result["reason"] else ""
    return f"{result['name']}: {result['status']} after {result['seconds']:.0f} s{reason}"


def run_wave(parts: Sequence[Part], device: str, folder: Path, ends: float) -> Iterator[Document]:
    """Run the parts at the same time and give what became of each as it ends. ends: a time.monotonic()."""
    started: dict[Part, tuple[subprocess.Popen[bytes], float, float]] = {}
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="shardiff-", ignore_cleanup_errors=True)
        temporary = Path(stack.enter_context(made))
        for part in parts:
            now = time.monotonic()
            if ends - now < 1:
                yield outcome(part, device, "not reached", 0.0, "no time was left", {})
                continue
            (folder / f"{part.name}.json").unlink(missing_ok=True)
            log = stack.enter_context(open(folder / f"{part.name}.log", "wb"))
            process = start(part, device, folder, log, temporary)
            stack.callback(end_if_running, process)
            started[part] = process, now, min(now + part.limit(device), ends)
        while started:
            time.sleep(0.05)
            for part, (process, since, until) in list(started.items()):
                late = time.monotonic() > until
                if process.poll() is None and not late:
                    continue
                timed_out = process.returncode is None
                code = end(process)
                del started[part]
                if timed_out:
                    status, reason = "out of time", f"it was ended after {until - since:.0f} s"
                elif code:
                    status, reason = "failed", last_words(folder / f"{part.name}.log", code)
                else:
                    status, reason = "done", None
                reached = read(folder / f"{part.name}.json")
                yield outcome(part, device, status, time.monotonic() - since, reason, reached)


def start(part: Part, device: str, folder: Path, log: IO[bytes], temporary: Path) -> subprocess.Popen[bytes]:
    """A part's process, in a session of its own, so that all that it starts can be ended."""
    command = [sys.executable, "-m", "benchmarks.gpu.parts", part.name, device, str(folder / f"{part.name}.json")]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(device, temporary),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def environment(device: str, temporary: Path | None = None) -> dict[str, str]:
    """The variables of a part's process, which imports from where this one does. temporary: its folder for files that
    nobody needs afterwards, such as what torch.compile caches."""
    path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    place = {} if temporary is None else {"TMPDIR": str(temporary)}
    return {**os.environ, **VARIABLES, **OF_DEVICE[device], "PYTHONPATH": path, **place}


def end_if_running(process: subprocess.Popen[bytes]) -> None:
    """End a part that is left behind, as by Ctrl-C."""
    if process.returncode is None:
        end(process)


def read(file: Path) -> Document:
    """What a part has reached; nothing if it has written nothing."""
    with suppress(FileNotFoundError):
        return json.loads(file.read_text(encoding="utf-8"))
    return {}


def last_words(log: Path, status: int) -> str:
    """The end of what a part wrote: of a Python error its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return f"it ended with {how}, and {log.name} ends with: {lines[-1] if lines else 'nothing'}"
