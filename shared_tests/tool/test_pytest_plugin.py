"""The pytest plugin: baselines beside the test, written on request, and the diff's table where they differ."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardiff import baseline
from shardiff.program import Program
from shardiff.pytest_plugin import Communication

pytest_plugins = "pytester"
ROOT = Path(__file__).parents[2]
TEST = """
import pytest
import shardiff

HLO = '''HloModule m, num_partitions=4
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
ENTRY main {
  p = f32[SIZE] parameter(0)
  ROOT r = f32[SIZE] all-reduce(p), replica_groups={{0,1},{2,3}}, to_apply=add
}'''


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=4"])
def test_step(communication, mesh):
    communication.check(HLO, mesh=mesh)


def test_two(communication):
    communication.check(shardiff.read(HLO), name="first")
    communication.check(shardiff.read(HLO), name="second")
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run pytest in this process, with the plugin loaded as usual, on tests of a program of so many floats."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "160")

    def started(size: int, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(test_step=TEST.replace("SIZE", str(size)))
        return pytester.runpytest_inprocess("-p", "shardiff.pytest_plugin", "-p", "no:cacheprovider", *arguments)

    return started


def test_a_test_fails_where_the_program_communicates_something_else(run, pytester):
    """First there is no baseline, then there is one, and then the program has changed."""
    kept = pytester.path / "test_step.communication.json"
    without = run(8)
    without.assert_outcomes(failed=3)
    without.stdout.fnmatch_lines(["*test_step.communication.json has no baseline of test_step[[]dp=4]: write it with*"])
    assert not kept.exists()

    run(8, "--update-communication").assert_outcomes(passed=3)
    names = ["test_step[dp=2,tp=2]", "test_step[dp=4]", "test_two first", "test_two second"]
    assert sorted(json.loads(kept.read_text())["programs"]) == names
    assert [path.name for path in pytester.path.iterdir() if path.name.startswith(".")] == []

    before = kept.read_bytes()
    run(8).assert_outcomes(passed=3)
    broken = run(16)
    broken.assert_outcomes(failed=3)
    assert kept.read_bytes() == before
    broken.stdout.fnmatch_lines(
        ["*>*communication.check(HLO, mesh=mesh)", "E *all_reduce 32 B*", "E *all_reduce 64 B*"]
    )
    assert "pytest_plugin.py" not in broken.stdout.str()  # the failure is shown at the test's own line


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    """As pytest-xdist's do; a lock on a folder is between open files, so threads stand for them."""
    tests = [Communication(tmp_path / "test_x.py", f"test_{i}", True) for i in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: one.check(Program(())), tests))
    assert len(baseline.read(tmp_path / "test_x.communication.json")) == 24


def test_loading_the_plugin_imports_nothing_else_of_ours():
    code = "import sys, shardiff.pytest_plugin; print([n for n in sys.modules if n.startswith('shardiff.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['shardiff.pytest_plugin']"


def test_the_wheel_registers_it():
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\nshardiff = "shardiff.pytest_plugin"' in text


@pytest.mark.parametrize("damage", ["{}", '{"schema": 99, "programs": {}}', "no json"])
def test_a_damaged_baseline_is_told_by_its_name(tmp_path, damage):
    path = tmp_path / "kept.json"
    path.write_text(damage)
    with pytest.raises(ValueError, match=r"kept\.json: "):
        baseline.read(path)
