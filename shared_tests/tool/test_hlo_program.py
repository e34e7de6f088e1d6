"""How a module's text is split into computations and statements, and what the ids in its groups mean."""

from __future__ import annotations

import pytest

from shardiff.hlo import read
from shardiff.hlo.instruction import Instruction, stack_frames
from shardiff.hlo.records import group_mode
from shardiff.hlo.text import BEGIN, END, parse, statements
from shared_tests.tool.hlo_modules import ALL, module, only

PROGRAM = """// before
HloModule m.1, is_scheduled=true, entry_computation_layout={(f32[8])->f32[8]}

FileNames
1 "a.py"

StackFrames
1 {file_location_id=1}

%f (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %y.1 = f32[8] negate(%x)
  ROOT %z = f32[8] copy(%y.1)
}, execution_thread="t"

g { a = f32[8] parameter(0) /* %b = */ b = (f32[8], s32[]) tuple(a, a), metadata={op_name="c = d("} }
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  %q = f32[8]
    call(%p),
    to_apply=%f
  ROOT %r = f32[8] fusion(%q), kind=kLoop, calls=%g
}
"""


def test_a_program_is_split_into_header_tables_computations_and_statements():
    program = parse(PROGRAM, frozenset(("call", "fusion", "tuple")))
    assert (program.name, program.entry) == ("m.1", "main")
    assert program.header == ", is_scheduled=true, entry_computation_layout={(f32[8])->f32[8]}"
    assert {name: table.split() for name, table in program.tables.items()} == {
        "FileNames": ["1", '"a.py"'],
        "StackFrames": ["1", "{file_location_id=1}"],
    }
    assert {name: c.is_entry for name, c in program.computations.items()} == {"f": False, "g": False, "main": True}
    assert [(where, found.opcode, found.name) for where, found in program.interesting] == [
        ("g", "tuple", "b"),
        ("main", "call", "q"),
        ("main", "fusion", "r"),
    ]
    texts = [PROGRAM[found.start : found.end].split() for _, found in program.interesting]
    assert texts[0][0] == "b" and texts[0][-1] == 'd("}' and texts[1] == "%q = f32[8] call(%p), to_apply=%f".split()
    assert {name: (list(program.index(name).line_of), program.index(name).root) for name in program.computations} == {
        "f": (["x", "y.1", "z"], "z"),
        "g": (["a", "b"], "b"),  # without a ROOT, the last one
        "main": (["p", "q", "r"], "r"),
    }
    of_f = program.index("f")
    assert all(PROGRAM[at:].split()[0] in ("%x", "%y.1", "ROOT") for at in of_f.line_of.values())
    assert program.index("f") is of_f


def test_statements_come_in_order_and_of_all_opcodes_or_of_some():
    start = PROGRAM.index("%f (x")
    every = [(found.opcode, found.name) for found in statements(PROGRAM, start, len(PROGRAM), None)]
    assert every == [
        *[(BEGIN, "f"), ("parameter", "x"), ("negate", "y.1"), ("copy", "z"), (END, "")],
        *[(BEGIN, "g"), ("parameter", "a"), ("tuple", "b"), (END, "")],
        *[(BEGIN, "main"), ("parameter", "p"), ("call", "q"), ("fusion", "r"), (END, "")],
    ]
    some = [found.opcode for found in statements(PROGRAM, start, len(PROGRAM), frozenset(("call", "copy")))]
    assert some == [BEGIN, "copy", END, BEGIN, END, BEGIN, "call", END]
    ends = [found.end for found in statements(PROGRAM, start, len(PROGRAM), None)]
    starts = [found.start for found in statements(PROGRAM, start, len(PROGRAM), None)]
    assert all(a <= b for a, b in zip(ends, starts[1:], strict=False)) and ends[-1] <= len(PROGRAM)
    assert list(statements(PROGRAM, start, start, None)) == []


def test_the_last_computation_is_the_entry_of_a_module_that_names_none():
    program = parse("HloModule m\na {\n x = f32[] parameter(0)\n}\nb {\n y = f32[] parameter(0)\n}\n", frozenset())
    assert (program.entry, program.interesting, program.header) == ("b", [], "")


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [  # device = 2 x replica + partition
        ("replica_groups={{0,1}}", ((0, 2), (1, 3))),  # replicas, each partition by itself
        ("replica_groups={{0,1}}, channel_id=1", ((0, 1, 2, 3),)),  # replicas, with all of their partitions
        ("replica_groups={{0,3},{1,2}}, channel_id=1, use_global_device_ids=true", ((0, 3), (1, 2))),
        ("replica_groups={{0,1}}, mode=cross_replica, channel_id=1", ((0, 2), (1, 3))),
        ("replica_groups={{0,1}}, mode=cross_partition", ((0, 1), (2, 3))),
        ("replica_groups={{0,3},{1,2}}, mode=flattened_id", ((0, 3), (1, 2))),
    ],
)
def test_ids_of_groups_are_replicas_partitions_or_devices(attributes, groups):
    text = f"""HloModule m, replica_count=2, num_partitions=2
add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}
ENTRY main {{
  x = f32[8] parameter(0)
  ROOT y = f32[8] all-reduce(x), {attributes}, to_apply=add
}}
"""
    (record,) = read(text).records
    assert record.groups == groups


@pytest.mark.parametrize(
    ("opcode", "attributes", "mode"),
    [
        ("all-reduce", "", "cross_replica"),
        ("all-to-all", "", "cross_replica"),
        ("all-gather", ", channel_id=1", "cross_replica_and_partition"),
        ("all-to-all", ", channel_id=1", "cross_partition"),
        ("reduce-scatter", ", channel_id=1, use_global_device_ids=true", "flattened_id"),
        ("reduce-scatter", ", channel_id=1, use_global_device_ids=false", "cross_replica_and_partition"),
        *(("all-reduce", f", channel_id=1, mode={mode}", mode) for mode in ("cross_replica", "flattened_id")),
        ("all-reduce", ", mode=another", "cross_replica"),
    ],
)
def test_attributes_tell_what_ids_mean(opcode, attributes, mode):
    assert group_mode(Instruction("r", "f32[8]", opcode, "p", attributes), opcode) == mode


def test_ids_of_devices_are_no_replicas_even_where_they_could_be():
    text = "HloModule m, replica_count=2, num_partitions=2\nENTRY main {\n  x = f32[8] parameter(0)\n  y = f32[8] "
    text += "all-reduce(x), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=x\n}\n"
    (record,) = read(text + "x {\n  p = f32[] parameter(0)\n}\n").records
    assert (record.groups, record.group_size) == (((0, 1),), 2)


def test_a_transfer_with_the_host_is_no_collective_and_ends_nothing():
    text = """HloModule m, num_partitions=2
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
ENTRY main {
  x = f32[8] parameter(0)
  token = token[] after-all()
  sent = (f32[8], u32[], token[]) send(x, token), channel_id=1, is_host_transfer=true
  end = token[] send-done(sent), channel_id=1, is_host_transfer=true
  got = (f32[8], u32[], token[]) recv(end), channel_id=2, is_host_transfer=true
  y = (f32[8], token[]) recv-done(got), channel_id=2, is_host_transfer=true
  z = f32[8] get-tuple-element(y), index=0
  ROOT sum = f32[8] all-reduce(z), channel_id=3, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=add
}
"""
    assert [record.op for record in read(text).records] == ["all_reduce"]


def test_text_of_another_system_reads_the_same():
    text = "HloModule m\nENTRY main {\n  x = f32[8] parameter(0)\n"
    text += "  ROOT y = f32[8] all-gather(x), replica_groups={}, dimensions={0}\n}\n"
    assert read(text.replace("\n", "\r\n")).records == read(text).records != []


def test_where_a_package_made_the_call_the_users_line_comes_first():
    """As XLA prints it, a frame's parent has one more than its number, and one without a parent has 1."""
    package = "/v/lib/python3.11/site-packages"
    tables = {
        "FileNames": f'\n1 "train.py"\n2 "{package}/flax/nnx/nn/linear.py"\n3 "{package}/optax/losses.py"\n',
        "FileLocations": "".join(
            f"\n{i} {{file_name_id={file} line={9 + i}}}" for i, file in enumerate((1, 1, 2, 3), 1)
        ),
        "StackFrames": "\n1 {file_location_id=1 parent_frame_id=1}\n2 {file_location_id=2 parent_frame_id=2}\n"
        "3 {file_location_id=3 parent_frame_id=3}\n4 {file_location_id=4 parent_frame_id=4}\n"
        "5 {file_location_id=4 parent_frame_id=1}\n",
    }
    lines = {"1": "train.py:10", "2": "train.py:11", "3": "train.py:11 (nn/linear.py:12)"}
    lines |= {"4": "train.py:11 (optax/losses.py:13)", "5": f"{package}/optax/losses.py:13"}
    assert stack_frames(tables) == lines
    plain = {**tables, "StackFrames": "\n1 {file_location_id=1}\n2 {file_location_id=3 parent_frame_id=1}\n"}
    assert stack_frames(plain) == {"1": "train.py:10", "2": "train.py:10 (nn/linear.py:12)"}
    around = {
        **tables,
        "StackFrames": "\n1 {file_location_id=3 parent_frame_id=2}\n2 {file_location_id=4 parent_frame_id=1}",
    }
    assert stack_frames(around) == {"1": f"{package}/flax/nnx/nn/linear.py:12", "2": f"{package}/optax/losses.py:13"}


def test_a_gather_for_a_sort_is_told_by_the_sort() -> None:
    """jaxlib 0.11 names such a gather by what made the array."""
    made = 'frontend_attributes={is_spmd_generated="true"}, metadata={op_name="jit(f)/jvp()/div"}'
    gather = f"%g = f32[64] all-gather(%p), {ALL}, dimensions={{0}}, {made}\n"
    sort = 'ROOT %s = f32[64] sort(%g), dimensions={0}, to_apply=%less, metadata={op_name="jit(f)/jvp()/top_k"}'
    less = "\n%less (a: f32[], b: f32[]) -> pred[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
    less += "  ROOT %c = pred[] compare(%a, %b), direction=LT\n}\n"
    assert only(module(gather + sort, less)).detail == "jvp()/top_k"
    assert only(module(gather.replace('is_spmd_generated="true"', "") + sort, less)).detail == "jvp()/div"
    assert only(module(gather + "ROOT %n = f32[64] negate(%g)")).detail == "jvp()/div"


def test_a_collective_without_a_name_is_told_by_what_made_its_operand() -> None:
    """GPUs' compilers turn an all-reduce into a reduce-scatter, or join several, and keep no name."""
    dot = '%d = f32[4,4,4] negate(%p), metadata={op_name="jit(f)/jvp(ab,bc->ac)/dot_general"}\n'
    scatter = f"ROOT %r = f32[1,4,4] reduce-scatter(%d), {ALL}, dimensions={{0}}, to_apply=%add"
    assert only(module(dot + scatter)).detail == "jvp(ab,bc->ac)/dot_general"
    named = scatter + ', metadata={op_name="jit(f)/jvp()/own"}'
    assert only(module(dot + named)).detail == "jvp()/own"

    flat = "%l = f32[1] constant({0})\n%f = f32[64] bitcast(%d)\n"
    flat += "%w = f32[65] fusion(%l, %f), kind=kLoop, calls=%joined\n"
    reduce = f"ROOT %r = f32[65] all-reduce(%w), {ALL}, to_apply=%add"
    inside = "\n%joined (x: f32[1], y: f32[64]) -> f32[65] {\n  %x = f32[1] parameter(0)\n  %y = f32[64] parameter(1)\n"
    inside += "  ROOT %c = f32[65] concatenate(%x, %y), dimensions={0}\n}\n"
    loss, product = only(module(dot + flat + reduce, inside)).parts
    assert (loss.bytes, loss.shape, loss.detail) == (4, None, None)
    assert (product.bytes, product.shape, product.detail) == (256, (4, 4, 4), "jvp(ab,bc->ac)/dot_general")
