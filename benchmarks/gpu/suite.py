"""The tests that need a GPU: pytest -m gpu."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.sizes import Sizes

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ("-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", "--color=no", "--continue-on-collection-errors")
LINE = re.compile(r"(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")


def on_gpu(sizes: Sizes, keep: Any) -> None:
    """Run them, one after the other, and keep the counts after each. Raises RuntimeError if pytest could not run."""
    command = [sys.executable, *COMMAND, *files_with_the_mark()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for counts in counted(process.stdout):
            keep({"tests": counts})
    if process.returncode not in (0, 1, 5):  # 1: tests have failed; 5: there were none
        raise RuntimeError(f"pytest ended with status {process.returncode}; its output is above")


def files_with_the_mark() -> list[str]:
    """The files that have such tests: to collect all the others takes ten seconds."""
    files = (file for file in (ROOT / "shared_tests").rglob("test_*.py") if "mark.gpu" in file.read_text("utf-8"))
    return sorted(str(file.relative_to(ROOT)) for file in files)


def counted(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    """The counts after each line of pytest -v that tells of a test; other lines are passed on."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    for line in lines:
        print(line, end="", flush=True)
        if not (told := LINE.match(line)):
            continue
        name, outcome = told.groups()
        kind = {"PASSED": "passed", "XFAIL": "passed", "SKIPPED": "skipped"}.get(outcome, "failed")
        counts[kind] += 1
        if kind == "failed":
            counts["failures"].append(name)
        yield {**counts, "failures": list(counts["failures"])}
