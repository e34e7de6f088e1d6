"""Plants a mistake in a copy of the repository, and runs its test there.

Processes that the test starts see the mistake too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from shared_tests.edited import edited_source
from shared_tests.meta.mutants.planted import Planted

ROOT = Path(__file__).parents[3]
PARTS = ("shardiff", "contract", "torch_impl", "jax_impl", "benchmarks", "shared_tests", "pyproject.toml")
TIMEOUT = 300.0  # seconds for one test with all its parameters, on a busy machine


def failure(planted: Planted) -> str:
    """How the mistake's test fails with it: the first line of the failure's message; "" if it does not."""
    with tempfile.TemporaryDirectory(prefix="shardiff-mutant-") as directory:
        root = Path(directory)
        copy_to(root)
        (root / planted.file).write_text(edited_source(planted.module, [planted.edit]), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", planted.test, "-x", "-q", "-m", "", "--junitxml=report.xml"]
        options = ["-p", "no:xdist", "-p", "no:cacheprovider", "--tb=short"]
        environment = {**os.environ, "PYTHONPATH": directory}
        try:
            done = subprocess.run(
                [*command, *options], cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return f"no answer in {TIMEOUT:g} s"
        report = root / "report.xml"
        return first_failure(report.read_text(encoding="utf-8")) if report.exists() else last_line(done.stdout)


def copy_to(root: Path) -> None:
    """Copy what the suite needs, keeping the files' times, so that compiled files stay valid."""
    for name in PARTS:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, root / name)


def first_failure(report: str) -> str:
    """The first line of the first failure in a JUnit report, "" without one; an error outside of a test says so."""
    tree = ElementTree.fromstring(report)
    if (error := tree.find(".//error")) is not None:
        return f"error outside of the test: {last_line(error.text or error.get('message') or '')}"
    found = tree.find(".//failure")
    return "" if found is None else (found.get("message") or "").strip().partition("\n")[0]


def last_line(text: str) -> str:
    """The last line that is not blank."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["no output"])[-1]
