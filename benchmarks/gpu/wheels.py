"""Packages that the python of a GPU machine may lack, from a folder of wheels: nothing else is installed.

Standard library only: this runs before anything that may be missing.

    python -m benchmarks.gpu.wheels DIR [VERSION ...]     fill DIR, on a machine with a network (`make wheels`)
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# What the project imports besides numpy, torch, jax, flax, optax and matplotlib -> what that needs in turn.
NEEDED = {
    "msgspec": (),
    "psutil": (),
    "jinja2": ("markupsafe",),
    "rich": ("markdown-it-py", "mdurl", "pygments"),
    "typer": ("annotated-doc", "shellingham", "pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    "pytest": ("iniconfig", "packaging", "pluggy"),
    "hypothesis": ("sortedcontainers",),
}
FRAMEWORKS = ("numpy", "torch", "jax", "flax", "optax")
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17, 12, 5)] + ["manylinux2014_x86_64"]


def missing(packages: Iterable[str]) -> list[str]:
    """Those of the packages that this python does not have."""
    absent = []
    for name in packages:
        try:
            version(name)
        except PackageNotFoundError:
            absent.append(name)
    return absent


def install(folder: Path | None, target: Path) -> list[str]:
    """Install what is missing of NEEDED from a folder of wheels into `target`, and import from there from now on.

    Returns what was installed. Raises ValueError, one line, if that is not enough.
    """
    if absent := missing(FRAMEWORKS):
        raise ValueError(f"{sys.executable} has no {', '.join(absent)}: give a python that has, as PYTHON=...")
    absent = [name for package in missing(NEEDED) for name in (package, *missing(NEEDED[package]))]
    if not absent:
        return []
    if folder is None:
        raise ValueError(
            f"{sys.executable} has no {', '.join(absent)}: run make wheels WHEELS=DIR on a machine with a network, "
            "then make gpu WHEELS=DIR"
        )
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder of wheels: make wheels WHEELS={folder} fills one")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--find-links", str(folder), "--target", str(target), *absent]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PIP_CONFIG_FILE": os.devnull})
    if done.returncode:
        told = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
        raise ValueError(f"{', '.join(absent)} cannot be installed from {folder}: {told}")
    sys.path.insert(0, str(target))
    importlib.invalidate_caches()
    return absent


def download(folder: Path, pythons: Sequence[str] = PYTHONS) -> None:
    """Fill a folder with the wheels of NEEDED for Linux on x86-64, in the versions of constraints.txt."""
    pins = dict(line.strip().split("==") for line in _constraints() if "==" in line and not line.startswith("#"))
    pinned = {name.lower().replace("_", "-"): number for name, number in pins.items()}
    names = [name for package, others in NEEDED.items() for name in (package, *others)]
    wanted = [f"{name}=={pinned[name]}" if name in pinned else name for name in names]
    folder.mkdir(parents=True, exist_ok=True)
    for python in pythons:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--implementation", "cp", "--python-version", python]
        command += [part for name in PLATFORMS for part in ("--platform", name)]
        subprocess.run([*command, "--dest", str(folder), *wanted], check=True)


def _constraints() -> list[str]:
    return (Path(__file__).resolve().parents[2] / "constraints.txt").read_text().splitlines()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("give a folder for the wheels: make wheels WHEELS=DIR")
    download(Path(sys.argv[1]), sys.argv[2:] or PYTHONS)
