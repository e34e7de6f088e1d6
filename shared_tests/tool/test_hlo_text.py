"""The HLO reader takes text in any layout, as XLA prints it or not, and sees what XLA's own parser sees."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from shardiff.hlo import read, read_file
from shared_tests.tool.hlo_modules import ALL, REAL, assert_same_instructions, brief, module, only, reduce, xla_parse

LAID_OUT = {
    "comments that look like code": """/* %x = f32[8] all-reduce(%p), replica_groups={{0,1}}
        %y = f32[8] all-reduce(%p) */
        // %z = f32[8] all-reduce(%p), replica_groups={{0,1}} /*
        BODY // } " {""",
    "a string over lines that looks like code": """%k = f32[8] custom-call(%p), custom_call_target="all-reduce(
        %z = f32[8] all-reduce(%p), replica_groups={{0,1}}
        }"
        BODY""",
    "a string with slashes and escaped quotes": r"""%k = f32[8] negate(%p), metadata={op_name="http://x/*\"} \\"}
        BODY, metadata={op_name="a /* b = c( // d \" = all-reduce("}""",
    "attributes on lines of their own": "BODY".replace("BODY", "BODY,\n\n  metadata={\n op_name=\"x\"\n }"),
    "two instructions on one line": "%k = f32[8] negate(%p) BODY",
}  # fmt: skip


@pytest.mark.parametrize("layout", LAID_OUT)
def test_layout_comments_and_strings_do_not_matter(layout: str) -> None:
    assert brief(only(module(LAID_OUT[layout].replace("BODY", reduce(ALL))))) == ("all_reduce", 32, 8, (1, 1))


def test_a_module_on_one_line_without_percent_signs_or_entry_is_read() -> None:
    text = """HloModule m add{a=f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a,b)}
    main{p = f32[8] parameter(0) ROOT r = f32[8] all-reduce(p), replica_groups={{0,1}}, to_apply=add}"""
    text = text.replace("a=f32", "a = f32")
    assert brief(only(text)) == ("all_reduce", 32, 2, (1, 1))


def test_operands_with_their_shapes_as_old_text_has_them() -> None:
    text = """%t = (f32[8]{0}, s32[]) tuple(f32[8]{0} %p, s32[] constant)
    ROOT %r = f32[8]{0} all-reduce(f32[8]{0} %p), replica_groups={{0,1}}, to_apply=%add,
      metadata={op_type="psum" op_name="x" source_file="f.py" source_line=3}""".replace("s32[] constant", "f32[8] %p")
    assert only(module(text.replace("s32[])", "f32[8]{0})"))).source == "f.py:3"


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name.removesuffix(".hlo.txt"))
def test_real_dumps_read_the_same_in_each_of_xlas_own_layouts(path: Path) -> None:
    hlo = pytest.importorskip("jaxlib._hlo")
    expected = [(brief(r), r.groups, r.edges, r.name) for r in read_file(path).records]
    again = xla_parse(path.read_text())
    bare, full = hlo.HloPrintOptions(), hlo.HloPrintOptions()
    bare.print_percent = False
    full.print_operand_shape = full.print_control_dependencies = True
    for options in (bare, full):
        found = read(again.to_string(options)).records
        assert Counter((brief(r), r.groups, r.edges, r.name) for r in found) == Counter(expected)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name.removesuffix(".hlo.txt"))
def test_real_dumps_hold_the_collectives_and_operands_that_xlas_parser_sees(path: Path) -> None:
    assert_same_instructions(path.read_text())


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    """Text of a few programs for 8 CPU devices: optimized, and as lowered."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("a", "b"))

    def primitives(x):
        part = jax.lax.psum_scatter(x, "b", scatter_dimension=0, tiled=True)
        whole = jax.lax.all_gather(part, "b", axis=0, tiled=True)
        swapped = jax.lax.all_to_all(whole, "b", 0, 1, tiled=True)
        return jax.lax.ppermute(whole, "a", [(0, 1)]), jax.lax.psum(swapped.astype(jnp.bfloat16), ("a", "b"))

    def loops(x, n):
        def outer(_, c):
            c = jax.lax.psum(c, "b") * 0.5
            return jax.lax.fori_loop(0, 3, lambda _, d: jax.lax.ppermute(d, "a", [(0, 1), (1, 0)]), c)

        x = jax.lax.fori_loop(2, 7, outer, x)
        x = jax.lax.cond(x[0, 0] > 0, lambda v: jax.lax.psum(v, "a"), lambda v: v * 2, x)
        x = jax.lax.fori_loop(0, n, lambda _, c: jax.lax.psum(c, "b") * 0.1, x)
        return jax.lax.while_loop(lambda c: jax.lax.psum(c.sum(), ("a", "b")) > 0, lambda c: c - 1, x)

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def sharded(function, *specs, out):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))

    ab, rep = PartitionSpec("a", "b"), PartitionSpec()
    array = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, ab))
    split = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "b")))
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, rep))
    batch = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("a")))
    programs = {
        "primitives": sharded(primitives, ab, out=(ab, rep)).lower(array),
        "loops": sharded(loops, ab, rep, out=ab).lower(array, count),
        "grad": jax.jit(jax.value_and_grad(loss)).lower([split] * 3, batch),
    }
    texts = {name: lowered.compile().as_text() or "" for name, lowered in programs.items()}
    return texts | {f"{name} as lowered": lowered.as_text(dialect="hlo") for name, lowered in programs.items()}


def test_what_jax_compiles_here_holds_what_xlas_parser_sees(compiled: dict[str, str]) -> None:
    for text in compiled.values():
        assert_same_instructions(text, its_own=True)


@pytest.mark.parametrize("program", ["primitives", "primitives as lowered"])
def test_every_jax_collective_is_read_with_its_mesh_axis_as_groups(compiled: dict[str, str], program: str) -> None:
    found = {record.op: record for record in read(compiled[program]).records}
    rows = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert {op: (r.payload_bytes, r.groups or r.edges) for op, r in found.items() if op != "all_reduce"} == {
        "reduce_scatter": (2048, rows),
        "all_gather": (2048, rows),
        "all_to_all": (2048, rows),
        "collective_permute": (2048, ((0, 4), (1, 5), (2, 6), (3, 7))),
    }
    total = found["all_reduce"]
    assert total.groups == (tuple(range(8)),) and brief(total)[1:3] in ((1024, 8), (2048, 8))
    if program == "primitives":  # the CPU compiler reduces bf16 in f32
        assert (total.dtype, total.flags) == ("float32", ("promoted",))
        assert all((r.source or "").rpartition(":")[0].endswith("test_hlo_text.py") for r in found.values())


@pytest.mark.parametrize("program", ["loops", "loops as lowered"])
def test_loops_and_branches_of_a_jax_program_run_as_often_as_written(compiled: dict[str, str], program: str) -> None:
    found = {(r.op, r.group_size, r.executions.min, r.executions.max) for r in read(compiled[program]).records}
    assert found == {
        ("all_reduce", 2, 0, 1),
        ("all_reduce", 4, 0, None),
        ("all_reduce", 4, 5, 5),
        ("all_reduce", 8, 1, None),
        ("collective_permute", None, 15, 15),
    }


def test_phases_of_a_gradient_are_forward_then_backward(compiled: dict[str, str]) -> None:
    phases = {(record.op, record.phase) for record in read(compiled["grad"]).records}
    assert ("all_gather", "forward") in phases and ("all_reduce", "backward") in phases
