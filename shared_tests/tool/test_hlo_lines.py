"""How HLO text is cut into statements: XLA's lines are taken whole, whatever else its parser reads token by token."""

from __future__ import annotations

import pytest

from shardiff.hlo import HloError, read
from shardiff.hlo.text import BEGIN, END, Statement, loose_header, loose_statement, parse, statements, value_end

PRINTED = """%f (x: f32[8]) -> (f32[8]{0}, /*index=1*/f32[8]) {
  %x = f32[8]{0} parameter(0), metadata={op_name="x" source_line=7}
  ROOT %y = (f32[8]{0}, /*index=1*/f32[8]) tuple(%x, %x)
}, execution_thread="t"
ENTRY main {
  p = f32[8] parameter(0)
  r = (f32[8], f32[8]) call(p), to_apply=f
}
"""


def test_lines_as_xla_prints_them_are_statements_as_they_stand():
    start = len("HloModule m\n")
    found = list(statements(f"HloModule m\n{PRINTED}", start, start + len(PRINTED), None))
    lines = PRINTED.splitlines(keepends=True)
    assert [statement.end - statement.start for statement in found] == [len(line) for line in lines]
    assert found[0].start == start and all(a.end == b.start for a, b in zip(found, found[1:], strict=False))
    assert [statement.is_entry for statement in found] == [False] * 4 + [True] + [False] * 3


def test_instructions_after_a_brace_on_its_line_are_told_apart():
    for brace in ("a {", "a\n{"):
        body = " x = f32[8] parameter(0) y=f32[8] negate(x)\n  ROOT z = f32[8] copy(y)\n  w = f32[8] copy(z)\n"
        found = parse(f"HloModule m\n{brace}{body}}}\n", frozenset()).index("a")
        assert (list(found.line_of), found.root) == (["x", "y", "z", "w"], "z")


@pytest.mark.parametrize(
    "first",
    [
        "f32[8] negate(p)",
        'f32[8] negate(p), metadata={op_name="w = f32[8] add(" source_line=7}',
        "f32[8] get-tuple-element(p), index=0",
        "(f32[8], f32[8]) tuple(p, p)",
    ],
)
def test_a_second_instruction_on_a_line_is_seen(first):
    for second in ("y=f32[8] copy(x)", "%y = f32[8] copy(x)", "ROOT y= f32[8] copy(x)"):
        text = f"\n  x = {first} {second}\n  z = f32[8] copy(y)\n"
        assert [found.name for found in statements(text, 1, len(text), None)] == ["x", "y", "z"]


def test_attributes_may_begin_on_the_next_line_with_their_comma():
    for end in (",\n  index=0", "\n  , index=0", "\n\n, index=0"):
        text = f"\n  x = f32[8] get-tuple-element(p){end}\n  y = f32[8] copy(x)\n"
        found = list(statements(text, 1, len(text), None))
        assert [statement.name for statement in found] == ["x", "y"]
        assert text[found[0].start : found[0].end].strip().endswith("index=0")


@pytest.mark.parametrize("shape", ["f32[8]", "(f32[8])"])
def test_a_computation_on_one_line_with_the_beginning_of_the_next_is_seen(shape):
    text = f"HloModule m\na (p: f32[8]) -> {shape} {{ x = f32[8] parameter(0) }} b (p: f32[8]) -> {shape} {{\n"
    program = parse(f"{text}  y = f32[8] parameter(0)\n}}\n", frozenset())
    assert {name: list(program.index(name).line_of) for name in program.computations} == {"a": ["x"], "b": ["y"]}


def test_the_entry_is_the_one_that_says_so_wherever_it_stands():
    text = "HloModule m\nENTRY e {\n  p = f32[] parameter(0)\n}\na {\n  p = f32[] parameter(0)\n}\n"
    assert parse(text, frozenset()).entry == "e"


HEADERS = [  # each is followed by an instruction
    "(p: f32[8]) -> f32[8] {",
    "(p: f32[8]{0}) ->\n f32[8]{0} {",
    "(p: f32[8]{0}) -> f32[8]{0}{",
    "(p: f32[8]) -> f32[8]{",
    "(p: f32[8]) -> f32[8]{:T(128)} {",
    "(p: f32[8]) -> f32[8]{} {",
    "(p: f32[8]) -> (f32[8]{0}, s32[]) {",
    "(p: f32[8]) -> /* [ */ f32[]{0:T(8)}\n{",
    "/* ( */ {",
    "Xy {",
    "{",
]


@pytest.mark.parametrize("header", HEADERS)
def test_a_computation_begins_at_the_brace_that_is_no_layout(header):
    text = f"f {header} x = f32[8] parameter(0)}}"
    assert loose_statement(text, 0) == Statement(BEGIN, "f", 0, len(f"f {header}"))
    (entry,) = [
        statement for statement in statements(f"\nENTRY {text}", 1, len(text) + 7, frozenset()) if statement.name
    ]
    assert entry.is_entry and entry.end == len(f"\nENTRY f {header}")


def test_braces_of_an_empty_computation_are_no_layout_where_space_is_before_them():
    assert loose_header("f (p: f32[8]) -> f32[8] {}", "f", 2) == len("f (p: f32[8]) -> f32[8] {")


@pytest.mark.parametrize("line", ["a, b {", "a b=c {", "a ) {", 'a "b" {', "a (p: f32[8]) ->  ] {"])
def test_what_begins_like_a_computation_but_is_none_is_refused(line):
    with pytest.raises(HloError) as problem:
        read(f"HloModule m\n{line}\n", "f")
    assert str(problem.value) == f"f: line 2: not HLO: {line!r}"


@pytest.mark.parametrize(
    "text",
    [
        "r=(f32[8],s32[])all-reduce(p)",
        "r=f32[8] all-reduce(p)",
        "%r =(f32[8], s32[]) all-reduce\n(p)",
        "ROOT r=\nf32[8]{0:T(8)} all-reduce(p)",
        "ROOT /* is */ r = Xf32[8] all-reduce(p)",
    ],
)
def test_an_instruction_is_found_however_little_space_is_in_it(text):
    text = f"\n{text} , a=b"
    assert list(statements(text, 1, len(text), None)) == [Statement("all-reduce", "r", 1, len(text))]


def test_attributes_of_a_computation_follow_its_closing_brace_with_or_without_space():
    for attributes in ('},execution_thread="t"', '} , execution_thread="t"', "}"):
        assert loose_statement(f"{attributes} a {{", 0) == Statement(END, "", 0, len(attributes))


def test_a_value_that_begins_with_any_letter_ends_where_it_ends():
    assert [value_end(text, 0) for text in ("X y", "Xy(a, b) c", "x[X] y")] == [1, 8, 4]
