"""The installed package is one, and works without the frameworks, from any folder and beside any modules.

"Without the frameworks" is a meta-path finder that refuses them, as where they are not installed; "the installed
package" is its folder alone, copied, so that no checkout lies beside it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from contract.axes import STRATEGIES
from contract.strategy import IMPLEMENTATIONS
from shared_tests import quick

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HLO = "HloModule f\nENTRY f { p = f32[4] parameter(0) ROOT r = f32[4] all-reduce(p), replica_groups={{0,1}} }"
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "jax", "jaxlib", "flax", "optax", "matplotlib", "libtpu"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
"""
COMMANDS = {
    "hlo step.txt": (0, "1 call"),
    "diff a.json a.json": (0, "same"),
    "targets": (0, 'pip install "shardiff[jax]"'),
    "--version": (0, "shardiff"),
    "trace train.py": (2, 'trace needs torch, which is not installed: pip install "shardiff[torch]"'),
    "compile train.py:step --target cpu:4 --mesh dp=4": (
        2,
        'compile needs jax, which is not installed: pip install "s',
    ),
    "check": (2, "check needs the strategies of the lesson"),
    "bench steps --ranks 2": (
        2,
        "bench needs the strategies of the lesson, which are not part of the installed package: c",
    ),
    "report --quick": (2, "clone the repository of shardiff and run make install there"),
    "diff tensor_parallel --target cpu:4": (2, "clone the repository of shardiff"),
}


@pytest.fixture(scope="module")
def own_names(tmp_path_factory) -> Path:
    """A folder with modules whose names are the lesson's too."""
    folder = tmp_path_factory.mktemp("own")
    for name in ("contract", "record", "check", "commands"):
        (folder / f"{name}.py").write_text("raise SystemExit('the user\\'s module was imported')\n")
    for name in ("benchmarks", "torch_impl", "jax_impl"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('the user\\'s package was imported')\n")
    (folder / "step.txt").write_text(HLO)
    (folder / "train.py").write_text("")
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A folder for sys.path with what a wheel holds."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "shardiff", folder / "shardiff", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_the_wheel_holds_one_package_whole():
    """Its folders are packages, and what is no module is named as package data."""
    find = PROJECT["tool"]["setuptools"]
    assert find["packages"]["find"]["include"] == ["shardiff*"] and find["packages"]["find"]["namespaces"] is False
    patterns = find["package-data"]["shardiff"]
    files = subprocess.run(["git", "ls-files", "shardiff"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in map(Path, files.splitlines()):
        inside = name.relative_to("shardiff")
        assert (ROOT / name.parent / "__init__.py").is_file() or inside.parent.name == "target_configs", name
        assert name.suffix == ".py" or any(inside.match(p) or inside.match(p.removeprefix("**/")) for p in patterns), (
            name
        )


def test_every_dependency_is_used_and_said_what_for():
    """A comment stands beside each; the tool's own are those that it imports outside of functions' frameworks."""
    text = (ROOT / "pyproject.toml").read_text()
    for group in (PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()):
        for requirement in group:
            if not requirement.startswith(("shardiff[", "jax[")):
                assert re.search(rf'"{re.escape(requirement)}", +# \w', text), requirement
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"torch", "jax", "compilers", "all", "lesson", "dev"} <= extras.keys()
    frameworks = re.compile(r"torch|jax|flax|optax|matplotlib")
    assert not any(frameworks.match(requirement) for requirement in PROJECT["project"]["dependencies"])


def test_without_frameworks_and_checkout_every_command_works_or_says_what_to_install(wheel, own_names, tmp_path):
    """All in one process: the package of a wheel, in a folder of the user's."""
    code = f"""{REFUSE}
import contextlib, io, json, os
sys.path[:] = [{str(wheel)!r}, *(path for path in sys.path if path not in ("", {str(ROOT)!r}))]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import shardiff
from shardiff.cli.main import main
assert shardiff.__file__.startswith({str(wheel)!r}), shardiff.__file__
with contextlib.redirect_stdout(io.StringIO()) as text:
    assert main(["hlo", "step.txt", "--json"]) == 0
open({str(tmp_path / "a.json")!r}, "w").write(text.getvalue())
found = {{}}
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = main(command.replace("a.json", {str(tmp_path / "a.json")!r}).split())
        except SystemExit as end:
            status = end.code
    found[command] = [status, out.getvalue(), err.getvalue()]
print(json.dumps(found))
"""
    command = [sys.executable, "-c", code, json.dumps(list(COMMANDS))]
    done = subprocess.run(command, cwd=own_names, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for line, (status, out, err) in json.loads(done.stdout).items():
        wanted, words = COMMANDS[line]
        assert (status, words in (out if wanted == 0 else err)) == (wanted, True), (line, status, out, err)
        if wanted:
            assert out == "" and err.count("\n") == 1 and err.startswith("shardiff: ")


def test_the_lesson_runs_whole_from_a_folder_with_modules_of_the_same_names_with_nothing_on_stderr(own_names):
    """sys.path begins with that folder, as for any module that is run from it."""
    arguments = "check --width 8 --batch 6 --steps 2 --degree 2 --dtype float64 --json"
    # It is not measured by `make coverage` either, which needs a plugin of ours on PYTHONPATH.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "COV"))}
    environment["XLA_FLAGS"] = quick.flags()
    command = [sys.executable, "-m", "shardiff", *arguments.split()]
    done = subprocess.run(command, cwd=own_names, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["implementation"], row["strategy"]) for row in rows] == [
        (implementation, strategy) for implementation in IMPLEMENTATIONS for strategy in STRATEGIES
    ]
    assert [row for row in rows if not row["passed"]] == []
