"""The pieces that the HLO reader takes a line apart with: commas, brackets, strings, comments, shapes, names."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardiff.hlo import HloError
from shardiff.hlo.errors import display, shown
from shardiff.hlo.flow import MAX_COUNT, capped
from shardiff.hlo.instruction import (
    Instruction,
    Leaf,
    attributes,
    clean,
    fields,
    leaves,
    names,
    source_of,
    split,
    stack_frames,
)
from shardiff.hlo.phases import latest, named_phase
from shardiff.hlo.records import dtype_name
from shardiff.hlo.text import attributes_end, balanced, skip, value_end
from shardiff.record import Executions

words = st.text("ab1.%-", min_size=1, max_size=4)
strings = st.text('a,(){}[]= /\\"\n', max_size=6).map(lambda s: '"' + s.replace("\\", "\\\\").replace('"', '\\"') + '"')
groups = st.recursive(
    words | strings,
    lambda inner: st.builds(
        lambda pair, parts, comma: pair[0] + comma.join(parts) + pair[1],
        st.sampled_from(["()", "[]", "{}"]),
        st.lists(inner, max_size=3),
        st.sampled_from([",", ", "]),
    ),
    max_leaves=8,
)
pieces = st.lists(groups, min_size=1, max_size=3).map("".join)


@settings(max_examples=100)
@given(st.lists(pieces, max_size=5), st.sampled_from([",", ", ", " ,\n"]))
def test_text_is_split_at_the_commas_outside_of_brackets_and_strings(parts, comma):
    assert split(comma.join(parts)) == parts
    assert split(f"  {comma.join(parts)} ") == parts


def test_text_without_commas_or_without_text_is_split_too():
    assert split("") == split("  ") == []
    assert split(",") == ["", ""] and split("a,") == ["a", ""]
    assert split("a), b") == ["a)", "b"]  # a bracket that nothing opened
    deep = "(" * 9 + "b, c" + ")" * 9
    assert split(f"a{deep}, X{deep},d") == [f"a{deep}", f"X{deep}", "d"]
    with pytest.raises(HloError, match="^cut off inside brackets: "):
        split("a, (b")


def test_slashes_in_deep_brackets_are_a_comment_only_with_a_star():
    for inside in ("a/b", "a / b", "/ *", '"x"*', "/*)*/"):
        for depth in (1, 9):
            group = "(" * depth + inside + ")" * depth
            assert balanced(f"{group})", 0) == len(group)


@settings(max_examples=100)
@given(groups.filter(lambda s: s[0] in "([{"), st.text('ab,()"', max_size=4), st.integers(0, 10))
def test_a_bracket_group_ends_where_its_first_bracket_closes(group, after, depth):
    for left, right in ("()", "[]", "{}"):
        group = left * depth + group + right * depth
        assert balanced(f"xy{group}{after}", 2) == 2 + len(group)


@settings(max_examples=60)
@given(st.lists(st.tuples(words, pieces), max_size=4), st.sampled_from([" ", "", "\n"]))
def test_attributes_end_where_no_comma_follows(pairs, space):
    text = "".join(f",{space}{name.replace('%', '_').replace('.', '_')}={value}" for name, value in pairs)
    assert attributes_end(f"x{text} y", 1) == 1 + len(text)
    assert attributes_end(f"x{text}", 1) == 1 + len(text)


def test_a_mesh_takes_its_device_ids_and_axes_along():
    for text in (
        "mesh['x'=2,'y'=4] {'y'}",
        "mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}",
        "mesh['x'=2,'y'=4], device_ids= (0,1) {'y'}",
        "mesh['x'=2,'y'=4] , device_ids = (0,1) {'y'}".replace(" = ", "="),
    ):
        assert attributes_end(f"x, replica_groups={text}, b=2 {{", 1) == len(f"x, replica_groups={text}, b=2")
        found = attributes(f", replica_groups={text}, b=2")
        assert found["b"] == "2" and found["replica_groups"].replace(" ", "") == text.replace(" ", "")
    assert attributes(", a=1, device_ids=(0)") == {"a": "1", "device_ids": "(0)"}
    assert attributes("device_ids=(0), a=mesh[]") == {"device_ids": "(0)", "a": "mesh[]"}
    assert attributes(", =1, a = 2, a=3") == {"a": "3"} and attributes("") == {}


def test_a_value_ends_at_space_or_comma_outside_of_brackets():
    for text in ("f32[8]{0}", '"a b, c"', "{a, b}(c)", "%x.1", "a/b"):
        for after in (" rest", ", rest", ""):
            assert value_end(text + after, 0) == len(text)
    assert value_end(", x", 0) == 0


def test_space_and_comments_are_skipped():
    text = " \n// one\n/* two */\t/* three\n */x"
    assert skip(text, 0) == text.index("x")
    assert skip("x", 0) == 0 and skip("  ", 0) == 2
    assert skip("/x", 0) == 0
    with pytest.raises(HloError, match="^cut off inside a comment: "):
        skip("  /* never", 0)


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("a /* b */ c", "a   c"),
        ("a // b\nc", "a  \nc"),
        ('a "// /* b */" c', 'a "// /* b */" c'),
        (r'a "\" // b" /* " */ c', r'a "\" // b"   c'),
        ("a /* // */ b", "a   b"),
        ("a / b", "a / b"),
    ],
)
def test_comments_are_replaced_by_a_space_and_strings_are_left(text, without):
    assert clean(text) == without


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{op_name="a b" source_line=7}', {"op_name": "a b", "source_line": "7"}),
        ('{a="x, y", b = 2,c=3}', {"a": "x, y", "b": "2", "c": "3"}),
        (r'{a="say \"no\" \\ x"}', {"a": r'say "no" \ x'}),
        (r'{a="\303\251 \\303 \9 \018 \400"}', {"a": "\xc3\xa9 \\303 9 018 400"}),  # a byte in octal is C's way, too
        ("{pairs={{0,1},{1,2}}, chain_id=4}", {"pairs": "{{0,1},{1,2}}", "chain_id": "4"}),
        ("{a=1, a=2}", {"a": "1"}),
        ("{x.y-z_1=ok}", {"x.y-z_1": "ok"}),
        ("  {a=1}  ", {"a": "1"}),
        ("", {}),
        ("{}", {}),
    ],
)
def test_fields_are_read_with_their_strings_unquoted(text, found):
    assert fields(text) == found


def test_names_come_with_and_without_percent_signs_and_braces():
    assert names("%f") == names("f") == names("{%f}") == ["f"]
    assert names("{%f, g,%h}") == ["f", "g", "h"]
    assert names("") == names("{}") == []
    assert names("X") == ["X"] and names("{X, %XX}") == ["X", "XX"]


def test_an_instruction_knows_its_operands_attributes_and_metadata():
    site = Instruction(
        "r", "f32[8]", "fusion", "f32[8]{0} %a, b, %c.1", ', calls=%f, metadata={op_name="jit(f)/x" source_line=3}'
    )
    assert site.operands == ("a", "b", "c.1")
    assert site.attributes == {"calls": "%f", "metadata": '{op_name="jit(f)/x" source_line=3}'}
    assert site.metadata == {"op_name": "jit(f)/x", "source_line": "3"}
    assert (site.op_name, site.backend_config) == ("jit(f)/x", "")
    for opcode in ("constant", "parameter"):
        assert Instruction("r", "s32[]", opcode, "7", "").operands == ()
    bare = Instruction("r", "f32[8]", "negate", "", ', metadata={source_line=3}, backend_config="{\\"n\\":1}"')
    assert (bare.operands, bare.op_name, bare.backend_config) == ((), "", '"{"n":1}"')
    hidden = Instruction("r", "f32[8]", "negate", "", r', a="metadata={op_name=\"no\"}", metadata={op_name="yes"}')
    assert hidden.op_name == "yes"


arrays = st.builds(
    lambda dtype, dims: (f"{dtype[0]}[{','.join(map(str, dims))}]", Leaf(dtype[0], tuple(dims), dtype[1])),
    st.sampled_from([("f32", 32), ("bf16", 16), ("pred", 8), ("s4", 4), ("u2", 2), ("c128", 128), ("f8e4m3fn", 8)]),
    st.lists(st.integers(0, 5), max_size=3),
)


@settings(max_examples=80)
@given(st.lists(st.lists(arrays, min_size=1, max_size=3) | arrays, min_size=1, max_size=4), st.booleans())
def test_arrays_of_a_shape_come_with_the_outermost_element_that_they_are_in(elements, with_token):
    written, want = [], []
    for index, element in enumerate(elements):
        if isinstance(element, list):
            written.append("(" + ", ".join(text for text, _ in element) + ")")
            want += [(index, leaf) for _, leaf in element]
        else:
            written.append(element[0] + "{0:T(8)}" * (len(element[1].dims) == 1))
            want.append((index, element[1]))
    tokens = ["token[]"] * with_token
    assert leaves("(" + ", ".join([*written, *tokens, *written]) + ")") == want + [
        (index + len(elements) + with_token, leaf) for index, leaf in want
    ]
    for _, leaf in want:
        assert leaf.num_bytes == -(-prod(leaf.dims) * leaf.bits // 8)
        assert leaves(f"{leaf.dtype}[{','.join(map(str, leaf.dims))}]") == [(0, leaf)]


def test_shapes_of_every_kind():
    assert leaves("f32[<=6, 4]") == [(0, Leaf("f32", (6, 4), 32, True))]
    assert leaves("f32[?,4]") == [(0, Leaf("f32", (1, 4), 32, True))]
    assert leaves("f32[<=?]") == [(0, Leaf("f32", (1,), 32, True))]
    assert [index for index, _ in leaves("(((u8[1], u8[2]), u8[3]), u8[4], ((u8[5])), u8[6])")] == [0, 0, 0, 1, 2, 3]
    assert leaves("s8[9]{0:E(4)}") == [(0, Leaf("s8", (9,), 4))]
    assert leaves("opaque[]") == leaves("token[]") == leaves("()") == []
    assert leaves(f"u8[{(2**63 - 1) // 49},49]")[0][1].num_bytes == 2**63 - 1
    with pytest.raises(HloError, match=rf"^shape u8\[{2**40},{2**23}\] is larger than any memory$"):
        leaves(f"u8[{2**40},{2**23}]")


TABLES = {
    "FileNames": '\n1 "\\303\\251.py"\n2 "b \\"c\\".py"\n',
    "FileLocations": (
        "\n1 {file_name_id=1 function_name_id=1 line=12 end_line=13}\n2 {file_name_id=9 line=4}\n3 {file_name_id=2}\n"
    ),
    "StackFrames": (
        "\n1 {file_location_id=1}\n2 {file_location_id=3 parent_frame_id=1}\n3 {file_location_id=2}\n"
        "4 {file_location_id=8}\n5 {parent_frame_id=1}\n"
    ),
}


def test_source_lines_come_from_the_tables():
    frames = stack_frames(TABLES)
    assert frames == {"1": "\xc3\xa9.py:12", "2": 'b "c".py:?', "3": "?:4"}
    assert stack_frames({}) == {}
    assert source_of({"stack_frame_id": "1"}, frames) == "\u00e9.py:12"
    assert source_of({"stack_frame_id": "4"}, frames) is None and source_of({}, frames) is None
    assert source_of({"source_file": "x.py", "stack_frame_id": "1"}, frames) == "x.py:?"
    assert source_of({"source_file": "\xc3\xa9.py", "source_line": "2"}, frames) == "\u00e9.py:2"


def test_text_is_shown_as_its_author_wrote_it():
    assert display("plain") == "plain"
    assert display("\u4f60".encode().decode("latin-1")) == "\u4f60"
    assert shown("x" * 60) == "x" * 60 and shown("x" * 61) == "x" * 60 + "..."
    assert shown("\xc3\xa9", 2) == "\u00e9" and shown("abc", 2) == "ab..."
    assert display("\xff") == "\ufffd" and display("\u4f60") == "?"


@pytest.mark.parametrize(
    ("op_name", "phase"),
    [
        *(
            (name, "update")
            for name in ("optimizer/x", "a/optax/b", "adam", "f(sgd)", "x/apply_updates", "APPLY_GRADIENTS")
        ),
        *((name, "update") for name in ("update", "a/update/b", "jit(update)/x", "jit(Adamw)")),
        *((name, "") for name in ("dynamic_update_slice", "a/updated", "xadam", "", "jit(f)/add")),
        ("jvp(update)", "forward"),
        ("update/transpose(jvp())", "backward"),
        ("jit(jvp)/x", ""),
    ],
)
def test_names_of_operations_tell_phases(op_name, phase):
    assert named_phase(op_name) == phase


def test_the_latest_phase_is_the_last_one_of_a_step():
    assert latest([]) == latest([""]) == ""
    assert latest(["forward", "", "backward"]) == "backward"
    assert latest(["update", "forward"]) == "update" and latest(["", "forward"]) == "forward"


@pytest.mark.parametrize(
    ("xla", "name"),
    [
        ("f32", "float32"),
        ("bf16", "bfloat16"),
        ("pred", "bool"),
        ("s4", "int4"),
        ("u64", "uint64"),
        ("c64", "complex64"),
    ]
    + [("f8e4m3b11fnuz", "float8_e4m3b11fnuz"), ("f4e2m1fn", "float4_e2m1fn"), ("zz7", "zz7")],
)
def test_types_are_named_as_numpy_names_them(xla, name):
    assert dtype_name(xla) == name


def test_counts_beyond_what_json_holds_are_unknown():
    assert capped(Executions(3, 5)) == Executions(3, 5) and capped(Executions(1, None)) == Executions(1, None)
    assert capped(Executions(MAX_COUNT, MAX_COUNT)) == Executions(MAX_COUNT, MAX_COUNT)
    assert capped(Executions(MAX_COUNT + 1, MAX_COUNT + 1)) == Executions(MAX_COUNT, None)
