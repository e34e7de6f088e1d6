"""Any text gives an answer or one line that refuses it, in linear time: damaged, huge, compressed, or no HLO."""

from __future__ import annotations

import gzip
import json
import random
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardiff.hlo import HloError, read, read_bytes, read_file
from shared_tests.tool.hlo_modules import ADD, ALL, CASES, CHOSEN, FLAT, GOOD, brief, module, reduce

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
