"""The HLO reader takes any text: as XLA prints it or not, damaged, huge, or no HLO. XLA's parser is the oracle."""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardiff.hlo import COLLECTIVES, HloError, read, read_bytes, read_file
from shardiff.hlo.instruction import instruction
from shardiff.hlo.text import parse
from shared_tests.tool.hlo_modules import ADD, ALL, CHOSEN, FLAT, brief, module, only, reduce, xla_parse

CASES = Path(__file__).parent / "hlo_cases"
GOOD = sorted(path for path in CASES.rglob("*.hlo.txt") if not path.name.startswith("bad_"))
REAL = sorted((CASES / "real").glob("*.hlo.txt"))


# The text itself.


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


def opcode_of(instruction) -> str:
    """all-reduce-start of kAllReduceStart, as far as collectives go."""
    name = str(instruction.opcode).rpartition(".k")[2]
    return "".join("-" + c.lower() if c.isupper() else c for c in name).lstrip("-")


def assert_same_instructions(text: str) -> None:
    """The collectives are those that XLA's parser sees, with the same operands, shapes and groups."""
    program = parse(text, COLLECTIVES)
    native = {}
    for computation in xla_parse(text).computations():
        for found in computation.instructions():
            opcode = opcode_of(found)
            if opcode == "async-start" and found.async_wrapped_root() is not None:
                opcode = opcode_of(found.async_wrapped_root()) + "-start"
            if opcode in COLLECTIVES:
                native[computation.name, found.name] = opcode, found
    printed = {computation for computation, _ in program.interesting}
    seen = {}
    for computation, statement in program.interesting:
        site = instruction(text, statement)
        seen[computation, site.name] = site.opcode
        _, found = native[computation, site.name]
        line = re.sub(r"%|/\*index=\d+\*/", "", found.to_string())
        assert site.operands == tuple(operand.name for operand in found.operands())
        assert f" = {' '.join(site.shape.split())} {site.opcode}(" in line
        for name in ("replica_groups", "source_target_pairs", "channel_id"):
            if name in site.attributes:
                assert f", {name}={site.attributes[name]}" in line
    assert seen == {key: opcode for key, (opcode, _) in native.items() if key[0] in printed}


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
        assert_same_instructions(text)


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


# Refusals.


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"BufferAssignment:\nallocation 0", "not HLO text"),
        (b"HloModule", "cut off"),
        (b"HloModule m, is_scheduled=true\n", "cut off"),
        (b"HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {\n", "cut off"),
        (b"HloModule is a class.\nIt has methods.\n", "HLO"),
        (b"module @jit_f attributes {mhlo.num_partitions = 8 : i32} {\n}", "StableHLO"),
        (b"#loc = loc(unknown)\nmodule @m {\n}", "StableHLO"),
        (b"ML\xefR\x01StableHLO_v1", "StableHLO"),
        (b"HloModule m\n\x00\x01", "binary"),
        (b"\x1f\x8b\x08\x00garbage", "gzip"),
        (b"HloModule m\ne {\n p = f32[] parameter(0)\n}\nHloModule n\n", "second module"),
        (b"HloModule m\ne {\n p = f32[] call(), to_apply=gone\n}\n", "gone"),
        (b"HloModule m\ne {\n p = all-reduce(), to_apply=e\n}\n", "no opcode"),
        (b"HloModule m\ne {\n p = what[8] all-reduce()\n}\n", "p: element type 'what'"),
        (b"HloModule m\ne {\n p = f32[8] all-reduce(), replica_groups=[3,2]<=[8]\n}\n", "p: replica groups"),
        (b"HloModule m, num_partitions=no\ne {\n p = f32[8] all-reduce()\n}\n", "no number of devices"),
        (b"HloModule m\na {\n p = f32[] call(), to_apply=a\n}\n", ""),
    ],
)
def test_what_is_no_hlo_is_refused_in_one_line_that_says_what_it_is(data: bytes, says: str) -> None:
    if data.endswith(b"to_apply=a\n}\n"):
        assert read_bytes(data, "f").records == []  # it calls itself, but no collective hangs on it
        return
    with pytest.raises(HloError, match=says) as problem:
        read_bytes(data, "dump.txt")
    assert str(problem.value).startswith("dump.txt: ") and "\n" not in str(problem.value)


def test_a_computation_with_a_collective_that_calls_itself_is_refused() -> None:
    itself = CHOSEN.replace("ROOT %y", "%again = f32[8] call(%x), to_apply=%yes\n      ROOT %y")
    with pytest.raises(HloError, match="yes calls itself"):
        read(module("ROOT %r = f32[8] call(%p), to_apply=%yes", itself))


def test_missing_and_unreadable_files_are_refused_by_name(tmp_path: Path) -> None:
    for path, says in (
        (tmp_path / "missing.txt", "no such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (Path("nul\0byte"), "cannot be read: embedded null byte"),
    ):
        with pytest.raises(HloError) as problem:
            read_file(path)
        assert str(problem.value) == f"{path}: {says}"
    (tmp_path / "dump.gz").write_bytes(gzip.compress(b"HloModule m")[:-9])
    with pytest.raises(HloError) as problem:
        read_file(tmp_path / "dump.gz")
    assert str(problem.value) == f"{tmp_path / 'dump.gz'}: the gzip file is cut off or damaged"


def test_gzip_byte_order_marks_carriage_returns_and_any_characters_are_read() -> None:
    text = module(reduce(ALL) + ', metadata={op_name="\u4f60\u597d \U0001f600" source_file="\u00e9.py" source_line=1}')
    for data in (
        text.encode(),
        gzip.compress(text.encode()),
        b"\xef\xbb\xbf" + text.encode(),
        text.encode("utf-16"),
        b"\xff\xfe" + text.encode("utf-16-le"),
        b"\xfe\xff" + text.encode("utf-16-be"),
        (text + "// ").encode("utf-16") + b"!",  # half a character
        text.replace("\n", "\r\n").encode(),
    ):
        assert [record.source for record in read_bytes(data, "f").records] == ["\u00e9.py:1"]
    assert [record.source for record in read(text).records] == ["\u00e9.py:1"]


def test_a_gzip_file_may_hold_as_many_bytes_as_there_is_memory_for() -> None:
    text = module(reduce(ALL)).encode()
    assert len(read_bytes(gzip.compress(text), "f", len(text)).records) == 1
    with pytest.raises(HloError, match=f"^f: the gzip file holds more than {len(text) - 1:,} bytes, "):
        read_bytes(gzip.compress(text), "f", len(text) - 1)
    assert len(read_bytes(text, "f", 1).records) == 1  # what is not packed is there already
    packed = gzip.compress(bytes(1 << 24))
    tracemalloc.start()
    with pytest.raises(HloError, match="holds more than 1,000 bytes"):
        read_bytes(packed, "f", 1000)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20  # it is not unpacked first
    tracemalloc.stop()


def test_every_text_that_is_cut_off_is_refused() -> None:
    text = (CASES / "fused_all_reduce_scatter.hlo.txt").read_text().replace(
        "num_partitions=4", "entry_computation_layout={(f32[256,1024])->f32[256,256]}, num_partitions=4")  # fmt: skip
    read(text)
    for end in range(len(text.rstrip())):
        with pytest.raises(HloError):
            read(text[:end])


# Any input gives an answer or an HloError, in linear time.


def answer_or_error(text: str) -> None:
    try:
        for record in read(text).records:
            json.dumps(record.to_json())
    except HloError as problem:
        assert "\n" not in str(problem)


SMALL = [path.read_text() for path in GOOD if path.stat().st_size < 2000]
TOKENS = [
    *'(){}[]=,"/\\% \n',
    *("/*", "*/", "//", "ROOT ", "ENTRY ", " = ", "f32[8]", "-1", "9" * 20),
    *("all-reduce(", "while(", "replica_groups=", "mesh['a'=2] {'a'}", "[2,4]<=[8]", "to_apply=%add", "body=%main"),
]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_text_gives_an_answer_or_one_line(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(SMALL))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 30)))
        text = text[:start] + data.draw(st.sampled_from(TOKENS) | st.text(max_size=3)) + text[end:]
    answer_or_error(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(TOKENS) | st.text(max_size=5), max_size=40))
def test_tokens_in_any_order_give_an_answer_or_one_line(tokens: list[str]) -> None:
    answer_or_error("HloModule m\n" + "".join(tokens))
    answer_or_error(module("".join(tokens)))


def test_a_real_dump_cut_anywhere_is_refused() -> None:
    text = (CASES / "real" / "moe.v5e_2x4.hlo.txt").read_text()
    for end in random.Random(0).sample(range(len(text.rstrip())), 40):
        with pytest.raises(HloError):
            read(text[:end])


@st.composite
def programs(draw: st.DrawFn) -> tuple[str, list[tuple]]:
    """A random module with a random layout, and what it communicates."""
    computations, expected, body = "", [], []
    for number in range(draw(st.integers(1, 4))):
        size, inside, times = draw(st.integers(1, 9)), "%p", (1, 1)
        groups, group_size = draw(
            st.sampled_from([("{{0,1},{2,3}}", 2), ("[4,2]<=[8]", 2), ("[2,4]<=[4,2]T(1,0)", 4), ("{}", 8)])
        )
        op, shape, rest, payload = draw(
            st.sampled_from(
                [
                    ("all-reduce", f"bf16[{size}]", "", 2 * size),
                    ("all-gather", f"f32[{size},8]", ", dimensions={1}", 32 * size),
                    ("reduce-scatter", f"f32[{size}]", ", dimensions={0}", 4 * size * group_size),
                    ("all-to-all", f"(s8[{size}], s8[{size}])", "", 2 * size),
                ]
            )
        )
        text = f"%c = {shape} {op}({inside}), {FLAT}replica_groups={groups}{rest}"
        callee = f"%f{number}"
        computations += f"{callee} (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n  {text}\n"
        computations += "  ROOT %x = f32[8] negate(%p)\n}\n\n"
        for depth in range(draw(st.integers(0, 3))):
            outer = f"{callee}.{depth}"
            kind, low, high = draw(
                st.sampled_from([("call", 1, 1), ("fusion", 1, 1), ("while", 4, 4), ("conditional", 0, 1)])
            )
            trips = '{"known_trip_count":{"n":"4"}}'
            site = {
                "call": f"call(%p), to_apply={callee}",
                "fusion": f"fusion(%p), kind=kLoop, calls={callee}",
                "while": f"while(%p), condition={callee}, body={callee}, backend_config={trips}",
                "conditional": f"conditional(%p, %p, %p), branch_computations={{{callee}, %add}}",
            }[kind]
            if kind == "while":
                low, high = 9, 9  # 4 trips and 5 tests
            computations += (
                f"{outer} (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n  ROOT %x = f32[8] {site}\n}}\n\n"
            )
            callee, times = outer, (times[0] * low, times[1] * high)
        body.append(f"%call.{number} = f32[8] call(%p), to_apply={callee}")
        expected.append((op.replace("-", "_"), payload, group_size, times))
    text = module("\n".join(body), computations)
    layout = draw(st.sampled_from(["printed", "short", "commented", "broken lines"]))
    if layout == "short":
        text = text.replace("%", "")
    elif layout == "commented":
        text = text.replace(" = ", " /* = all-reduce( */ = ").replace("{\n", "{ // }\n")
    elif layout == "broken lines":
        text = text.replace(", ", ",\n").replace("{\n  ", "{ ")
    return text, expected


@settings(max_examples=150, deadline=None)
@given(programs())
def test_a_generated_program_is_read_as_it_was_generated(program: tuple[str, list[tuple]]) -> None:
    text, expected = program
    assert Counter(map(brief, read(text).records)) == Counter(expected)


def test_50000_nested_computations_are_read() -> None:
    depth = 50_000
    parts = [
        "HloModule deep, num_partitions=2\n",
        CHOSEN.partition("%no")[0].replace(ALL, "replica_groups={{0,1}}"),
        ADD,
    ]
    for level in range(depth):
        callee = f"c{level - 1}" if level else "yes"
        parts.append(f"%c{level} (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n"
                     f"  ROOT %r = f32[8] call(%p), to_apply=%{callee}\n}}\n\n")  # fmt: skip
    parts.append(f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n"
                 f"  ROOT %r = f32[8] call(%p), to_apply=%c{depth - 1}\n}}\n")  # fmt: skip
    (record,) = read("".join(parts)).records
    assert brief(record)[3] == (1, 1)


def calls_made(text: str) -> int:
    """How many functions the reader calls, those written in C included."""
    count = 0

    def observe(frame, event, argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(observe)
    try:
        answer_or_error(text)
    finally:
        sys.setprofile(before)
    return count


GROWING = {
    "collectives": lambda n: module(
        "\n".join(f"%r.{i} = f32[8] all-reduce(%p), {ALL}, to_apply=%add" for i in range(n))
    ),
    "comments": lambda n: module("\n".join(f"%r.{i} = f32[8] /* c */ negate(%p) // d" for i in range(n))),
    "one line": lambda n: module(" ".join(f"%r.{i} = f32[8] negate(%p)" for i in range(n))),
    "groups": lambda n: module(reduce(FLAT + "replica_groups={" + "{0,1}," * n + "{0,1}}")),
    "nested braces": lambda n: module(reduce(ALL) + ", backend_config=" + "{" * n + "}" * n),
    "nested tuples": lambda n: module("%x = " + "(" * n + "f32[8]" + ")" * n + " all-reduce(%p), replica_groups={}"),
    "computations": lambda n: module("", "".join(f"%c{i} {{\n  %x = f32[8] parameter(0)\n}}\n" for i in range(n))),
    "open brackets": lambda n: "HloModule m\n" + "(" * n,
    "open strings": lambda n: module('%x = f32[8] negate(%p), metadata={op_name="' + '","' * n),
}


@pytest.mark.parametrize("kind", GROWING)
def test_work_grows_linearly_with_the_text(kind: str) -> None:
    small, large = (calls_made(GROWING[kind](size)) for size in (300, 1200))
    assert large < 4 * small + 1000
