"""The machine that a figure was measured on, so that it never stands alone. Imports no framework to ask its version."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("numpy", "torch", "jax", "jaxlib", "flax", "optax")


def facts() -> dict[str, Any]:
    """The system, the processor, cores that this process may use, memory, GPUs, versions, commit and date (UTC)."""
    return {
        "os": platform.platform(),
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def summary(machine: dict[str, Any]) -> str:
    """The facts in one line, for the foot of a table."""
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "jax"))
    gpus = "".join(f", {name}" for name in machine["gpus"])
    return f"{machine['cpu']}, {machine['cores']} cores, {memory}{gpus}; {versions}, Python {machine['python']}"


def cpu_model() -> str:
    """The processor's name as the kernel gives it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def cores() -> int:
    """How many cores this process may run on. A container or taskset can make them fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(num_ranks: int) -> int:
    """The threads that each of so many ranks on this machine computes with: OMP_NUM_THREADS, else its share of cores.

    Raises ValueError if OMP_NUM_THREADS is no number."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, cores() // num_ranks))


def gpus() -> list[str]:
    """The names of the NVIDIA GPUs that nvidia-smi lists."""
    lines = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return [line.strip() for line in (lines or "").splitlines() if line.strip()]


def gpu_properties(*names: str) -> dict[str, str]:
    """Properties of the first NVIDIA GPU by nvidia-smi's names for them; empty where it is missing or does not know."""
    lines = (_output("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader") or "").splitlines()
    return dict(zip(names, map(str.strip, lines[0].split(",")), strict=True)) if lines else {}


def num_gpus() -> int:
    """How many NVIDIA GPUs there are. Where nvidia-smi is missing, as in some containers, the device files tell."""
    return max(len(gpus()), len([*Path("/dev").glob("nvidia[0-9]*")]))


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checkout's commit, with a + if tracked files have changed; None for an installed copy."""
    root = Path(__file__).resolve().parents[2]
    top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD")
    if top is None or Path(top.splitlines()[0]).resolve() != root:
        return None
    dirty = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return top.splitlines()[1] + ("+" if dirty else "")


def _output(*command: str) -> str | None:
    """What a command prints; None if it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
