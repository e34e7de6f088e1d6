"""`shardiff diff LEFT RIGHT`: each side may be a file, a function that is compiled, or a script that is traced."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardiff.cli import main as cli
from shardiff.cli import sides
from shardiff.compiling import launch
from shardiff.compiling.reading import read
from shardiff.program import Program
from shardiff.tracing.traced import Traced
from shared_tests.tool.test_targets import needs

STEP = """
import jax
import jax.numpy as jnp

def total(mesh):
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("dp")))
    return (lambda x: x.sum(axis=0)), (x,)
"""
SCRIPT = """
import torch
import torch.distributed as dist

print("the script's own output")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(8))
dist.destroy_process_group()
"""
HLO = """HloModule m, num_partitions=2
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
ENTRY main { p = f32[8] parameter(0) ROOT r = f32[8] all-reduce(p), replica_groups={{0,1}}, to_apply=add }"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in (("step.py", STEP), ("run.py", SCRIPT), ("one.txt", HLO), ("empty.txt", "")):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_script_and_a_function_are_the_same_program(folder, capfd):
    """The same 32 bytes, summed over two ranks: written in torch, and derived by XLA."""
    command = ["diff", "run.py", "step.py:total", "--nproc", "2", "--target", "cpu:2", "--mesh", "dp=2", "--json"]
    assert cli.main(command) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert err == "the script's own output\n" * 2
    assert (found["left"]["label"], found["right"]["label"]) == ("run.py on 2 ranks", "step.py:total on cpu:2")
    for side in (found["left"], found["right"]):
        (record,) = side["records"]
        assert (record["op"], record["payload_bytes"], record["axis"]) == ("all_reduce", 32, "dp")
        assert side["mesh"] == {"dp": 2}


def test_a_text_is_read_with_its_mesh_and_called_by_its_file(folder):
    (side, _) = sides.plan(["one.txt", "one.txt"], meshes=("dp=2", None))
    program = sides.program(side)
    assert (program.label, [record.axis for record in program]) == ("one.txt", ["dp"])


def test_one_function_on_two_targets(folder, capfd):
    needs("h100:8")
    command = ["diff", "step.py:total", "step.py:total", "--left-target", "cpu:2", "--right-target", "h100:8"]
    assert cli.main([*command, "--mesh", "dp=2", "--fail-on", "unexplained"]) == 0
    out, err = capfd.readouterr()
    assert err == "" and "step.py:total on cpu:2" in out and "step.py:total on h100:8" in out and "same" in out


def test_what_fails_in_the_user_s_code_is_told_with_its_status(folder, monkeypatch, capsys):
    def raises(*args: object, **kwargs: object) -> None:
        raise launch.UserCodeError("step.py:wrong for cpu:2 raised KeyError")

    monkeypatch.setattr(launch, "programs", raises)
    assert cli.main(["diff", "one.txt", "step.py:wrong", "--target", "cpu:2", "--mesh", "dp=2"]) == 3
    assert capsys.readouterr().err == "shardiff: step.py:wrong for cpu:2 raised KeyError\n"
    for status, errors, told in (
        (7, [], (7, " ended with status 7")),
        (0, ["the ranks disagree"], (1, ": the ranks disagree")),
    ):
        done = Traced(status, None, 2, Program(()), errors, [], [], {}, [])
        monkeypatch.setattr(sides, "trace_program", lambda *args, done=done: done)
        assert cli.main(["diff", "one.txt", "run.py"]) == told[0]
        assert capsys.readouterr().err == f"shardiff: the trace of run.py{told[1]}\n"


def test_one_steady_step_of_a_run_is_compared_unless_another_is_asked_for(folder, monkeypatch):
    record = read("one.txt").records[0]
    parts = {f"step {n}": Program((replace(record, payload_bytes=n),), f"step {n}") for n in (1, 2, 3)}
    run = Program((record,) * 4, segments={"set-up": Program((record,)), **parts})
    asked = []

    def traced(*args):
        asked.append(args)
        return Traced(0, None, 2, replace(run, label=args[5]), [], [], [], {}, [])

    monkeypatch.setattr(sides, "trace_program", traced)
    shown = {}
    for step in (None, 1, 0):
        (side, _) = sides.plan(["run.py 3 '4 5'", "one.txt"], meshes=("dp=2", None), nproc=2, step=step)
        program = sides.program(side)
        shown[step] = program.label, [r.payload_bytes for r in program], {r.axis for r in program}
    assert shown == {
        None: ("run.py 3 '4 5' on 2 ranks (step 3 of 3)", [3], {"dp"}),
        1: ("run.py 3 '4 5' on 2 ranks (step 1 of 3)", [1], {"dp"}),
        0: ("run.py 3 '4 5' on 2 ranks", [32] * 4, {"dp"}),
    }
    assert [args[:3] for args in asked] == [("script", "run.py", ("3", "4 5"))] * 3
    with pytest.raises(ValueError, match="^run.py 3 '4 5' on 2 ranks has 3 training steps, so there is no step 4$"):
        sides.program(replace(side, step=4))


def test_a_strategy_is_a_side_too(folder, monkeypatch, capsys):
    from benchmarks import diff_strategies

    asked = []
    program = Program(read("one.txt").records, "data_parallel on 2 ranks")
    monkeypatch.setattr(diff_strategies, "written", lambda run, timeout: asked.append(run) or program)
    assert cli.main(["diff", "data_parallel", "one.txt", "--degree", "2", "--width", "64", "--json"]) == 0
    assert [(run.strategy, run.world_size, run.problem.width) for run in asked] == [("data_parallel", 2, 64)]
    assert json.loads(capsys.readouterr().out)["left"]["label"] == "data_parallel on 2 ranks"


def test_the_steps_of_a_run_in_a_file_are_its_segments(folder):
    record = read("one.txt").records[0].to_json()
    parts = {name: {"records": [record]} for name in ("set-up", "step 1", "step 2")}
    (folder / "run.json").write_text(json.dumps({"program": "run.py", "records": [record] * 3, "segments": parts}))
    (side, _) = sides.plan(["run.json", "one.txt"])
    program = sides.program(side)
    assert (program.label, len(program)) == ("run.json (step 2 of 2)", 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("one.txt", "diff compares two programs, got 1; each may be a .json of shardiff's"),
        ("one.txt no.txt", "no.txt: no such file; each side may be a .json"),
        ("one.txt no.py:step --target cpu:2 --mesh dp=2", "no.py: no such file"),
        ("one.txt step.py:total", "step.py:total needs a --target to be compiled for, such as cpu:8"),
        ("one.txt step.py:total --target cpu:2", "step.py:total needs the axes of its mesh, such as --mesh dp=2"),
        ("one.txt step.py:total --target cpu:2 --mesh dp=4", "the mesh dp=4 needs 4 devices, cpu:2 has 2"),
        ("one.txt one.txt --target cpu:2", "neither side is one"),
        ("one.txt one.txt --nproc 2", "--nproc is for a torch script, SCRIPT.py, and neither side is one"),
        ("one.txt run.py --nproc 0", "nproc must be at least 1, got 0"),
        ("one.txt one.txt --mesh dp", "a mesh is AXIS=RANKS"),
        ("one.txt one.txt --step -1", "step must be the number of a training step, or 0 for the whole run; got -1"),
        ("one.txt one.txt --step 1", "one.txt has 0 training steps, so there is no step 1"),
        ("one.txt one.txt --fail-on everything", "unknown fail-on 'everything'; known: unexplained, extra-bytes"),
        ("one.txt empty.txt", "empty.txt: empty: HLO text starts with HloModule"),
        ("tensor_parallel --nproc 2", "--nproc and --step are for two programs that are no strategies"),
    ],
)
def test_wrong_sides_are_refused_in_one_line(folder, arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sides, "trace_program", None)
    monkeypatch.setattr(launch, "programs", None)
    if "got 1" in words:
        with pytest.raises(ValueError, match="^diff compares two programs, got 1"):
            sides.plan(["one.txt"])
        return
    assert cli.main(["diff", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("shardiff: ") and err.count("\n") == 1 and words in err
