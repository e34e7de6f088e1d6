"""`import shardiff`: its names, that it imports no framework, and programs read from every form in which they come."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardiff
from shardiff.mesh import Mesh
from shardiff.record import record, totals
from shared_tests.tool.test_targets import needs


def product(mesh: Any, size: int = 64) -> Any:
    """A product of two matrices split in blocks, lowered."""
    block = jax.ShapeDtypeStruct((size, size), jnp.float32, sharding=NamedSharding(mesh, P("dp", "tp")))
    return jax.jit(lambda a, b: (a @ b).sum()).lower(block, block)


@pytest.fixture(scope="module")
def compiled() -> Any:
    return product(shardiff.mesh("cpu:8", dp=4, tp=2)).compile()


def test_importing_it_imports_no_framework_and_every_name_is_there():
    code = """
import sys, shardiff
assert set(shardiff.__all__) <= set(dir(shardiff))
shardiff.Program, shardiff.Record
assert not {"torch", "jax", "flax", "optax", "rich", "typer"} & sys.modules.keys()
import shardiff.mesh, shardiff.diff
assert callable(shardiff.mesh) and callable(shardiff.diff) and shardiff.mesh.Mesh().size == 1
try:
    shardiff.nothing
except AttributeError as error:
    assert str(error) == "module 'shardiff' has no attribute 'nothing'"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("state", [pytest.param("imported", marks=pytest.mark.long), "started"])
def test_a_mesh_leaves_the_devices_of_a_process_in_which_jax_has_started(state):
    """In this process, jax has started with 8; in another, it was only imported, or has started and found no GPU."""
    before = jax.devices()
    mesh = shardiff.mesh("cpu:64", dp=8, tp=8)
    assert mesh.axis_names == ("dp", "tp") and mesh.devices.shape == (8, 8)
    assert jax.devices() == before and len(before) == 8
    code = """
import sys, jax, jax.numpy as jnp
if sys.argv[1] == "started": jax.devices()
import shardiff
from shardiff.compiling.hardware import has_compiler, parse
for target in ("cpu:8", "h100:8", "v5e:2x4"):
    if has_compiler(parse(target).kind):
        sharding = jax.NamedSharding(shardiff.mesh(target, dp=8), jax.P("dp"))
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
        assert shardiff.compile(lambda x: x.sum(), x).counts() == {"all_reduce": 1}, target
assert len(jax.devices()) == 1 and float(jnp.ones(3).sum()) == 3
"""
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/"}  # without JAX_PLATFORMS
    command = [sys.executable, "-c", code, state]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_sizes_of_axes_follow_from_the_target():
    assert shardiff.mesh("cpu:8", dp=-1, tp=2).devices.shape == (4, 2)
    assert shardiff.mesh("cpu:8", tp=2).devices.shape == (2,)  # some of the devices do
    assert shardiff.mesh("cpu:8", x=8, axis_types=(AxisType.Explicit,)).axis_types == (AxisType.Explicit,)
    for axes, words in (
        ({}, "at least one axis, such as dp=8"),
        ({"dp": 4, "tp": 4}, "the mesh dp=4,tp=4 needs 16 devices, cpu:8 has 8"),
        ({"dp": -1, "tp": 3}, "the mesh dp=-1,tp=3 leaves no whole number of the 8 devices of cpu:8 to dp"),
        ({"dp": -1, "tp": -1}, "dp and tp both have -1"),
        ({"dp": 0}, "axis dp must have at least 1 rank, or -1 for all that is left; got 0"),
        ({"dp": 2.0}, "got 2.0"),
    ):
        with pytest.raises(ValueError) as refusal:
            shardiff.mesh("cpu:8", **axes)  # type: ignore[arg-type]
        assert words in str(refusal.value)


def test_devices_of_a_slice_lie_along_its_links():
    needs("v5e:4x4")
    mesh = shardiff.mesh("v5e:4x4", dp=4, tp=4)
    for row in mesh.devices:
        assert len({d.coords[0] for d in row}) == 1 or len({d.coords[1] for d in row}) == 1
    program = shardiff.read(product(mesh))
    assert program.mesh == Mesh((("dp", 4), ("tp", 4))) and {r.axis for r in program} <= {"dp", "tp", "dp,tp"}
    assert len(program) > 0


def test_a_program_is_the_same_read_from_any_form_of_it(compiled, tmp_path):
    program = shardiff.read(compiled)
    assert program.mesh == Mesh((("dp", 4), ("tp", 2))) and {r.axis for r in program} == {"dp", "tp"}
    assert program.memory["arguments"] == 2 * 64 * 64 * 4 // 8 and program.label == "jit__lambda"
    assert shardiff.read(product(shardiff.mesh("cpu:8", dp=4, tp=2))) == program

    text, dump = compiled.as_text(), tmp_path / "dump"
    dump.mkdir()
    (dump / "module_0001.jit_f.cpu_after_optimizations.txt").write_text(text)
    (dump / "module_0001.jit_f.before_optimizations.txt").write_text(text)
    (dump / "module_0002.jit_g.cpu_after_optimizations.txt").write_text(
        "HloModule g\nENTRY g { ROOT p = f32[] parameter(0) }"
    )
    (tmp_path / "f.txt.gz").write_bytes(gzip.compress(text.encode()))
    json_file = tmp_path / "f.json"
    json_file.write_text(json.dumps({"module": program.label, "records": [r.to_json() for r in shardiff.read(text)]}))
    for source in (text, dump, str(dump), tmp_path / "f.txt.gz", json_file):
        found = shardiff.read(source, mesh="dp=4,tp=2")
        assert found.records == program.records and found.memory == {}
        assert found.label == ("f.json" if source == json_file else program.label)
        assert {r.axis for r in shardiff.read(source)} == {None}
    assert shardiff.read(text, mesh=compiled.input_shardings[0][0].mesh, label="mine").label == "mine"


def test_what_cannot_be_read_is_refused_in_one_line(compiled, tmp_path):
    (tmp_path / "empty").mkdir()
    two = tmp_path / "two"
    two.mkdir()
    for name in "ab":
        (two / f"{name}.after_optimizations.txt").write_text(compiled.as_text())
    for source, words in (
        (
            lambda x: x,
            "read takes a jax.stages.Compiled or Lowered, HLO text, or a path; got a function: for a function",
        ),
        (tmp_path / "none.txt", "none.txt: no such file"),
        (tmp_path / "empty", "empty: no *after_optimizations.txt in this folder"),
        (two, "two: 2 programs communicate here, give one of them: a.after_optimizations.txt, b.after"),
        ("HloModule", "HloModule"),
    ):
        with pytest.raises(ValueError) as refusal:
            shardiff.read(source)  # type: ignore[arg-type]
        assert words in str(refusal.value) and "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="^mesh must be axes such as dp=4,tp=4"):
        shardiff.read(compiled, mesh=4)  # type: ignore[arg-type]


def test_questions_that_one_asks_of_a_program(compiled):
    program = shardiff.read(compiled)
    assert not program.only("all_to_all", over=2**20)
    for wrong, words in (
        ({"op": "all_gathr"}, "unknown op 'all_gathr'; known: all_reduce, "),
        ({"phase": "fwd"}, "unknown phase 'fwd'; known: forward, backward, update, other$"),
        ({"dtype": "bf16"}, "unknown dtype 'bf16'; known: "),
        ({"axis": "model"}, "no axis 'model' in the mesh "),
        ({"size": 3}, "a record has no field 'size'; it has op, "),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            program.only(**wrong)  # type: ignore[arg-type]
    assert program.only("all_gather", axis="tp", dtype="float32").counts() == {"all_gather": 1}
    assert program.payload_bytes == totals(program.records)["payload_bytes"]["min"] > 0
    assert sum(program.counts().values()) == len(program.records)


def test_two_programs_are_compared(compiled):
    left = shardiff.read(compiled)
    shardiff.diff(left, left).assert_same()
    right = shardiff.read(product(shardiff.mesh("cpu:8", dp=2, tp=4)))
    with pytest.raises(AssertionError, match="(?s)the programs differ.*all_gather"):
        shardiff.diff(left, right).assert_same(allow=("combined", "moved"))


def test_a_program_is_shown_as_a_short_table_in_which_everything_is_escaped(compiled):
    program = shardiff.read(compiled, label="<f>")
    heading, columns, *rows = repr(program).splitlines()
    assert heading.startswith("<f> (dp=4,tp=2): 4 calls, ") and "a rank sends" in heading
    assert columns.split() == ["phase", "op", "axis", "calls", "payload", "a", "rank", "sends"]
    assert [row.split()[:4] for row in rows] == [
        ["other", op, axis, "1"] for op in ("all_gather", "all_reduce") for axis in [r.axis for r in program.only(op)]
    ]
    html = program._repr_html_()
    assert "&lt;f&gt;" in html and "<f>" not in html and html.count("<tr>") == 5
    assert repr(shardiff.Program(())) == "a program: no communication"


def test_what_the_busiest_stage_of_a_pipeline_sends_is_not_told_of_all():
    sends = [
        record("collective_permute", "float32", 64, None, phase="forward", edges=((rank, rank + 1),))
        for rank in (0, 0, 1)
    ]
    heading, columns, row = repr(shardiff.Program(tuple(sends))).splitlines()
    assert heading == "a program: 3 calls, 192 B payload, a rank sends between 64 B and 128 B"
    assert columns.endswith("a rank sends at most") and row.split()[-4:] == ["192", "B", "128", "B"]


def test_a_function_is_compiled_whether_jitted_or_not():
    mesh = shardiff.mesh("cpu:4", x=4)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    plain = shardiff.compile(lambda x, scale: (x * scale).sum(), x, scale=np.float32(2))
    jitted = shardiff.compile(jax.jit(lambda x: x.sum()), x)
    assert plain.counts() == jitted.counts() == {"all_reduce": 1}
    assert [r.axis for r in plain] == ["x"]


def test_nothing_but_the_framework_is_missing_where_it_is_not_installed(tmp_path):
    """A meta-path finder refuses torch and jax, as where they are not installed."""
    path = tmp_path / "step.txt"
    path.write_text(
        "HloModule f\nENTRY f { p = f32[4] parameter(0) ROOT r = f32[4] all-reduce(p), replica_groups={{0,1}} }"
    )
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "jax", "jaxlib", "flax", "optax", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
import shardiff
assert shardiff.read({str(path)!r}).counts() == {{"all_reduce": 1}}
shardiff.diff(shardiff.read({str(path)!r}), shardiff.read({str(path)!r})).assert_same()
calls = (lambda: shardiff.mesh("cpu:8", dp=8), lambda: shardiff.compile(len), lambda: shardiff.abstract([], None))
for call in (*calls, lambda: shardiff.trace(len), lambda: shardiff.tracing(), lambda: shardiff.step()):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    needed = {"jax": ("mesh", "compile", "abstract"), "torch": ("trace", "tracing", "step")}
    assert done.stdout.splitlines() == [
        f'shardiff.{name} needs {framework}, which is not installed: pip install "shardiff[{framework}]"'
        for framework, names in needed.items()
        for name in names
    ]
