"""`make coverage`: runs the suite under coverage, in all of its processes, and lists the statements that did not run.

Worker processes, forks, command lines and traced scripts are measured as pytest itself is; `last_words` lets processes
that are about to be killed save their data. It fails if the suite fails or if a package is below LEAST. Lines that need
a GPU count like any others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardiff.system import machine

PACKAGES = ("shardiff", "contract", "torch_impl", "jax_impl", "benchmarks")
LEAST = 95.0  # percent of a package's statements
ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shared_tests.meta.covered", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the result to this file as JSON")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --, instead of the whole suite's")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardiff-coverage-") as directory:
        status = suite(directory, options.pytest or ["-n", "auto", "--maxprocesses", "8"])
        files = measured(directory)
    result = {"packages": packages(files), "missed": missed(files), "pytest_status": status, "machine": machine.facts()}
    show(result, Console())
    if options.output:
        files.write(options.output, result)
    below = [name for name, row in result["packages"].items() if row["percent"] < LEAST]
    if below:
        print(f"below {LEAST:g}%: {', '.join(below)}", file=sys.stderr)
    return 1 if status or below else 0


def suite(directory: str, arguments: list[str]) -> int:
    """Run pytest with its processes' data in a directory; its exit status."""
    environment = {
        **os.environ,
        "COVERAGE_FILE": f"{directory}/data",
        "SHARDIFF_COVERAGE": directory,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),  # for the plugin
    }
    command = [sys.executable, "-m", "coverage", "run", "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def measured(directory: str) -> dict[str, Any]:
    """File -> what coverage's JSON says of it, from the data of all processes."""
    environment = {**os.environ, "COVERAGE_FILE": f"{directory}/data"}
    report = Path(directory, "report.json")
    for command in (["combine", "--quiet"], ["json", "--quiet", "-o", str(report)]):
        subprocess.run([sys.executable, "-m", "coverage", *command], cwd=ROOT, env=environment, check=True)
    return json.loads(report.read_text())["files"]


def packages(files: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Package -> its statements, those that ran, and the percentage."""
    rows = {}
    for package in PACKAGES:
        of = [file["summary"] for path, file in files.items() if path.startswith(f"{package}/")]
        statements, covered = (sum(s[key] for s in of) for key in ("num_statements", "covered_lines"))
        rows[package] = {"statements": statements, "covered": covered, "percent": 100 * covered / max(1, statements)}
    return rows


def missed(files: dict[str, Any]) -> dict[str, list[str]]:
    """File -> lines that did not run, as ranges: "3", "7-9". Only statements count, so a range can skip others."""
    return {path: list(ranges(file)) for path, file in sorted(files.items()) if file["missing_lines"]}


def ranges(file: dict[str, Any]) -> Iterator[str]:
    lines = sorted([(n, True) for n in file["missing_lines"]] + [(n, False) for n in file["executed_lines"]])
    for absent, group in groupby(lines, key=lambda line: line[1]):
        numbers = [number for number, _ in group]
        if absent:
            yield f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def show(result: dict[str, Any], console: Console) -> None:
    """Print the table, and below it the statements that did not run."""
    table = Table("package", "statements", "covered", "%", title="Statement coverage by the suite")
    for name, row in result["packages"].items():
        table.add_row(name, f"{row['statements']:.0f}", f"{row['covered']:.0f}", f"{row['percent']:.1f}")
    console.print(table)
    for line in not_covered(result["missed"]):
        print(line)
    print(machine.summary(result["machine"]))


def not_covered(missed: dict[str, list[str]]) -> Iterable[str]:
    yield "Not covered:"
    for path, lines in missed.items():
        yield f"  {path}:{','.join(lines)}"


if __name__ == "__main__":
    sys.exit(main())
