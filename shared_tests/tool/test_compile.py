"""`shardiff compile`: a function of a user's file is compiled with its own modules, whatever ours are called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from shardiff import baseline
from shardiff.cli import main as cli
from shardiff.compiling import launch, process
from shardiff.mesh import Mesh
from shardiff.program import Program
from shared_tests.tool.test_targets import needs

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys
os.environ["JAX_ENABLE_X64"] = "1"  # read when jax is imported
import jax
import jax.numpy as jnp
import contract, record
from benchmarks import speed

print(contract.terms, record.value, speed.limit, sys.argv, flush=True)
assert sys.path[0] == os.path.dirname(__file__)

def product(a, b):
    return (a @ b).sum()

def block(mesh, size=64):
    return jax.ShapeDtypeStruct((size, size), jnp.float64, sharding=jax.NamedSharding(mesh, jax.P("dp", "tp")))

def step(mesh):
    return product, (block(mesh), block(mesh))

def lowered(mesh):
    return jax.jit(product).lower(block(mesh), b=block(mesh))

def by_name(mesh):
    return product, (block(mesh),), {"b": block(mesh)}

def larger(mesh):
    return product, (block(mesh, 128), block(mesh, 128))

def raises(mesh):
    def wrong(x):
        return x @ undefined
    return wrong, (block(mesh),)

def arguments(mesh):
    return product, (block(mesh),)

def leaves(mesh):
    sys.exit(4)

def number(mesh):
    return 3

def no_args(mesh):
    return product, block(mesh)

def two(mesh, more):
    pass
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """A program beside modules that have the same names as modules of the lesson."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "train.py").write_text(PROGRAM)
    (folder / "contract.py").write_text("terms = 3\n")
    (folder / "record.py").write_text("value = 7\n")
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "__init__.py").touch()
    (folder / "benchmarks" / "speed.py").write_text("limit = 9\n")
    return folder / "train.py"


def test_a_function_is_compiled_for_every_target_with_its_own_modules(file, capfd):
    """The checkout, where the test runs, has packages of the same names."""
    assert cli.main(["compile", f"{file}:step", "--target", "cpu:8", "--target", "cpu:4", "--mesh", "dp=-1,tp=2"]) == 0
    out, err = capfd.readouterr()
    assert err == "" and out.startswith(f"3 7 9 ['{file}']\n")
    for heading in ("train.py:step on cpu:8 (dp=4,tp=2)", "train.py:step on cpu:4 (dp=2,tp=2)"):
        assert heading in out
    lines = [line.split() for line in out.splitlines()]
    assert ["dp", "4", "2", "16.4", "kB", "12.3", "kB"] in lines and ["tp", "2", "2", "8.2", "kB", "4.1", "kB"] in lines
    assert "float64" in out and "memory of a device: 8.19 kB arguments" in out


def test_a_mesh_that_leaves_devices_of_the_target_idle_says_so_in_the_heading(monkeypatch, capsys):
    programs = [Program((), f"step on {target}", Mesh((("dp", 2), ("tp", 2)))) for target in ("cpu:8", "cpu:4")]
    monkeypatch.setattr(launch, "programs", lambda *arguments: programs)
    assert (
        cli.main(["compile", f"{__file__}:step", "--target", "cpu:8", "--target", "cpu:4", "--mesh", "dp=2,tp=2"]) == 0
    )
    out = capsys.readouterr().out
    assert "step on cpu:8 (dp=2,tp=2; 4 of 8 devices)\n" in out and "step on cpu:4 (dp=2,tp=2)\n" in out


def test_json_says_what_the_table_says_and_the_program_s_output_goes_to_stderr(file, capfd):
    needs("h100:8", "v5e:2x4")
    targets = ("cpu:8", "h100:8", "v5e:2x4")
    options = [word for target in targets for word in ("--target", target)]
    assert cli.main(["compile", f"{file}:step", *options, "--mesh", "dp=4,tp=2", "--json"]) == 0
    out, err = capfd.readouterr()
    assert err == f"3 7 9 ['{file}']\n"
    for target, line in zip(targets, out.splitlines(), strict=True):
        found = json.loads(line)
        assert list(found) == [
            *("schema", "program", "target", "mesh", "records", "totals", "by_axis", "memory", "failed")
        ]
        assert (found["target"], found["mesh"], found["failed"]) == (target, {"dp": 4, "tp": 2}, [])
        assert (
            sum(sums["wire_bytes"]["min"] for sums in found["by_axis"].values()) == found["totals"]["wire_bytes"]["min"]
        )
        assert {record["axis"] for record in found["records"]} <= {"dp", "tp", "dp,tp"}
        assert found["memory"]["arguments"] >= 2 * 64 * 64 * 8 // 8


def test_a_budget_or_a_baseline_that_is_exceeded_makes_the_status_1(file, tmp_path, capfd):
    kept, target = tmp_path / "kept.json", ["--target", "cpu:8", "--mesh", "dp=4,tp=2"]
    command = ["compile", f"{file}:step", *target, "--baseline", str(kept)]
    baseline.write(kept, {"cpu:2": Program(())})
    assert cli.main([*command, "--update-baseline", "--fail-on", "all_gather > 1kB"]) == 1
    assert "over budget: all_gather > 1kB: all_gather of 16.4 kB" in capfd.readouterr().out
    assert cli.main([*command, "--fail-on", "all_gather > 1MB"]) == 0
    capfd.readouterr()
    assert cli.main(["compile", f"{file}:larger", *target, "--baseline", str(kept), "--json"]) == 1
    (line,) = capfd.readouterr().out.splitlines()
    assert any("more than the baseline: other all_gather over dp" in text for text in json.loads(line)["failed"])
    assert list(baseline.read(kept)) == ["cpu:2", "cpu:8"]
    assert str(file) not in kept.read_text()  # lines of code move


def test_an_error_in_the_user_s_code_is_shown_from_its_own_frame_on(file, capfd):
    target = ["--target", "cpu:4", "--mesh", "dp=2,tp=2"]
    assert cli.main(["compile", f"{file}:raises", *target]) == 3
    lines = capfd.readouterr().err.splitlines()
    assert lines[:2] == [
        "Traceback (most recent call last):",
        f'  File "{file}", line {1 + line_of("x @ undefined")}, in wrong',
    ]
    assert "NameError: name 'undefined' is not defined" in lines
    assert lines[-1] == f"shardiff: {file}:raises for cpu:4 raised NameError: name 'undefined' is not defined"
    assert not any("shardiff/" in line for line in lines)
    assert cli.main(["compile", f"{file}:leaves", *target]) == 3
    assert capfd.readouterr().err == f"shardiff: {file}:leaves for cpu:4 ended the process with status 4\n"


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(PROGRAM.splitlines()) if text in line)


@pytest.fixture
def here(file, monkeypatch):
    """Does in this process, which has loaded modules of these names, what a process of its own would do."""
    for name in ("contract", "record", "benchmarks", "benchmarks.speed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != ROOT])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    before = set(sys.modules)
    with jax.enable_x64(True):  # which jax reads from the environment only when it is first imported
        yield file
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_what_it_returns_may_be_lowered_or_have_arguments_by_name(here):
    programs = [process.programs(str(here), name, {"dp": 2, "tp": 2}, ["cpu:4"]) for name in ("lowered", "by_name")]
    assert programs[0] == programs[1] and programs[0][0]["module"] == "jit_product"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("number", "must return (function, args) or a jax.stages.Lowered; it returned an object of type int"),
        ("no_args", "args a tuple; its args are an object of type ShapeDtypeStruct"),
        ("two", "must take one argument, the mesh; it takes (mesh, more)"),
        ("stp", "has no function 'stp'; it has product, block, step, lowered"),
    ],
)
def test_a_function_that_returns_something_else_is_refused_in_one_line(here, name, words):
    with pytest.raises(ValueError) as refusal:
        process.programs(str(here), name, {"dp": 2, "tp": 2}, ["cpu:4"])
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_arguments_that_do_not_fit_are_an_error_of_the_user_s(here, capsys):
    with pytest.raises(process.Failed, match="arguments for cpu:4 raised TypeError: product\\(\\) missing 1 "):
        process.programs(str(here), "arguments", {"dp": 2, "tp": 2}, ["cpu:4"])
    assert "product() missing 1 required positional argument: 'b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nowhere.py:step --target cpu:4 --mesh dp=4", "nowhere.py: no such file"),
        ("FILE --target cpu:4 --mesh dp=4", "a function is FILE.py:NAME or MODULE:NAME, such as train.py:step; got"),
        ("not-a-module:step --target cpu:4 --mesh dp=4", "not-a-module is neither a Python file nor a module"),
        ("FILE:step --mesh dp=4", "give at least one --target to compile for, such as cpu:8"),
        ("FILE:step --target cpu:4", "give the axes of the mesh as --mesh, such as dp=4, or dp=-1,tp=2"),
        ("FILE:step --target cpu:4 --mesh dp", "a mesh is AXIS=RANKS for each axis, outermost first"),
        ("FILE:step --target cpu:4 --mesh dp=8", "the mesh dp=8 needs 8 devices, cpu:4 has 4"),
        ("FILE:step --target gpu:4 --mesh dp=4", "unknown target 'gpu'"),
        ("FILE:step --target cpu:4 --mesh dp=4 --fail-on all_gather", "'all_gather' is no budget"),
        ("FILE:step --target cpu:4 --mesh dp=4 --update-baseline", "--update-baseline needs --baseline FILE.json"),
        ("FILE:step --target cpu:4 --mesh dp=4 --baseline no.json", "no.json: no such baseline; write it with"),
        ("FILE:step --target cpu:4 --mesh dp=4 --baseline b.txt --update-baseline", "must be a .json file"),
    ],
)
def test_wrong_options_are_refused_in_one_line_before_anything_starts(file, arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert cli.main(["compile", *arguments.replace("FILE", str(file)).split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("shardiff: ") and err.count("\n") == 1 and words in err


def test_a_module_is_found_from_the_current_directory(file):
    command = [sys.executable, "-m", "shardiff", "compile", "train:step", "--target", "cpu:4", "--mesh", "dp=2,tp=2"]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("3 7 9 ['train']\n")
