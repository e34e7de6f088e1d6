"""What docs/api.md and docs/ci.md show is true: the programs run, the commands and the workflow are understood."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardiff.cli import main as cli
from shared_tests.tool.test_targets import needs

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("api", "ci")}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


def test_every_block_is_of_a_kind_that_is_checked():
    for page in PAGES.values():
        assert set(re.findall(r"^```(\w+)$", page, re.MULTILINE)) <= {"python", "sh", "yaml"}


def test_the_programs_run():
    """One after the other in one process, none with names of another."""
    needs("v5e:4x4", "h100:8")
    programs = blocks("api", "python")
    assert len(programs) >= 3
    code = (
        "import sys\nfor code in sys.argv[1:]:\n    exec(compile(code, '<api.md>', 'exec'), {'__name__': '__main__'})"
    )
    done = subprocess.run([sys.executable, "-c", code, *programs], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


def commands() -> list[str]:
    lines = [line for body in blocks("ci", "sh") for line in body.splitlines()]
    (workflow,) = blocks("ci", "yaml")
    document: Any = yaml.safe_load(workflow)
    lines += [step["run"] for job in document["jobs"].values() for step in job["steps"] if "run" in step]
    assert document["permissions"] == {"contents": "read"}
    return lines


@pytest.mark.parametrize("line", commands())
def test_a_command_is_understood(line, monkeypatch, tmp_path, capsys):
    match shlex.split(line):
        case ["shardiff", *arguments]:
            from shardiff.cli import compile as compiling

            monkeypatch.chdir(tmp_path)
            (tmp_path / "train.py").write_text("")
            (tmp_path / "step.json").write_text('{"schema": 1, "programs": {"h100:8": {"records": []}}}')
            planned = []
            monkeypatch.setattr(compiling, "show", lambda plan, json: planned.append(plan) or 0)
            assert cli.main(arguments) == 0 and len(planned) == 1, capsys.readouterr().err
        case ["pip", "install", requirement]:
            assert set(requirement.removeprefix("shardiff[").removesuffix("]").split(",")) <= EXTRAS.keys()
        case ["pytest"]:
            pass
        case _:
            pytest.fail(f"no test knows how to check {line!r}")
