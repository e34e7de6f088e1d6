"""What the HLO reader says of text that it cannot read: the line, what is wrong, and what would be right."""

from __future__ import annotations

import pytest

from shardiff.hlo import HOW, HloError, Module, read, read_bytes

END = ": HLO text ends with the closing brace of its last computation"
ENTRY = "ENTRY e {\n  p = f32[8] parameter(0)\n  "  # @ below
OTHER = "c {\n  p = f32[] parameter(0)\n}\n"  # # below

REFUSED = [
    ("", f"empty: HLO text starts with HloModule; {HOW}"),
    (" \n\t", f"empty: HLO text starts with HloModule; {HOW}"),
    ("module jit_f {\n}", f"StableHLO (MLIR), not HLO: {HOW}"),
    ("HloModule m\n\0", f"binary, not HLO text: for text, dump with --xla_dump_hlo_as_text or {HOW}"),
    ("HloModule", "cut off inside the HloModule line" + END),
    ("HloModule   ", "cut off inside the HloModule line" + END),
    ("HloModule , x=1", "line 1: HloModule has no name"),
    ("\nHloModule , x=1\n", "line 2: HloModule has no name"),
    ("no HLO at all, is it not? No.", "not HLO text: it starts with 'no HLO at all, is it not'"),
    ("\n\n  /* c */ nothing", "not HLO text: it starts with 'nothing'"),
    ("HloModule m\na {\nb {\n  p = f32[] parameter(0)\n}\n}\n", "line 3: computation b begins inside a"),
    ("HloModule m\n\n}\n", "line 3: a closing brace without a computation"),
    ("HloModule m\n##", "line 6: computation c is defined twice"),
    ("HloModule m\nr = f32[] all-reduce()\n", "line 2: instruction r outside of any computation"),
    ("HloModule m\na {\n", "cut off inside computation a" + END),
    ("HloModule m\n#b {\n", "cut off inside computation b" + END),
    ("HloModule m\n", "cut off inside the module, before any computation" + END),
    (
        "HloModule m, entry_computation_layout={()->f32[]}\n#",
        "cut off inside the module, before the ENTRY computation" + END,
    ),
    ("HloModule m\nENTRY #ENTRY d {\n  p = f32[] parameter(0)\n}\n", "2 ENTRY computations: a module has one"),
    ("HloModule m\n#HloModule n\n", "line 5: a second module begins: one module per file"),
    ("HloModule m\n#  ?what is this line about, then\nx\n", "line 5: not HLO: '?what is this line about'"),
    ("HloModule m\n#  ?short\nx\n", "line 5: not HLO: '?short'"),
    ("HloModule m\r\na {\r\n  ?short\r\n}\r\n", "line 3: not HLO: '?short'"),
    ("HloModule m\na {\n  x = f32[8] \n}\n", "line 4: instruction x has no opcode"),
    ("HloModule m\na {\n  x = f32[8] all-reduce", "cut off inside instruction x" + END),
    ("HloModule m\na {\n  x = f32[8] All()\n}\n", "line 3: instruction x has no opcode"),
    ("HloModule m\na (p: f32[]) -> ", "cut off inside the header of computation a" + END),
    ("HloModule m /* never", "cut off inside a comment" + END),
    ("HloModule m\na {\n  x = f32[8] all-reduce(p, \n", "cut off inside brackets" + END),
    ('HloModule m\na {\n  x = f32[8] all-reduce("p, \n', "cut off inside a string or a comment" + END),
    ("HloModule m\na {\n  x = f32[8] all-reduce(/*p, \n", "cut off inside a string or a comment" + END),
    ('HloModule m, a="b', "cut off inside a string" + END),
    ("HloModule m,\n", "cut off inside attributes" + END),
    ("HloModule m,\n =2", "line 2: an attribute name is missing"),
    ("HloModule m,\n =2\n\n", "line 2: an attribute name is missing"),
    ("HloModule m, a=", "cut off inside attributes" + END),
    ("HloModule m, a=\n\n,b=2\n\n", "line 3: a= has no value"),
    (
        "HloModule m\n@r = f32[8] call(p), to_apply=gone\n}\n",
        "computation gone is called but not in the text: a part is missing",
    ),
    (
        "HloModule m\nagain {\n x = f32[8] all-reduce(p)\n z = f32[8] call(x), to_apply=again\n}\n"
        "@r = f32[8] call(p), to_apply=again\n}\n",
        "computation again calls itself",
    ),
    ("HloModule m\n@r = {a b} all-reduce(p)\n}\n", "line 4: instruction r cannot be read"),
    ("HloModule m\n@r =\n{a b()} all-reduce(p)\n}\n", "line 4: instruction r cannot be read"),
    ("HloModule m\n@r = what[8] all-reduce(p)\n}\n", "instruction r: element type 'what' is unknown"),
    ("HloModule m\n@r = f32[8,x] all-reduce(p)\n}\n", "instruction r: shape f32[8,x] cannot be read"),
    (
        "HloModule m\n@r = f32[999999999999,999999999999] all-reduce(p)\n}\n",
        "instruction r: shape f32[999999999999,999999999999] is larger than any memory",
    ),
    (
        "HloModule m\n@r = f32[8] all-reduce(p), replica_groups=everyone\n}\n",
        "instruction r: replica groups 'everyone' cannot be read",
    ),
    (
        "HloModule m, num_partitions=0\n@r = f32[8] all-reduce(p), replica_groups={{0,1}}\n}\n",
        "'0' is no number of devices",
    ),
    (
        "HloModule m, replica_count=1234567890\n@r = f32[8] all-reduce(p), replica_groups={{0,1}}\n}\n",
        "'1234567890' is no number of devices",
    ),
    (
        "HloModule m, replica_count=two\n@r = f32[8] all-reduce(p), replica_groups={{0,1}}\n}\n",
        "'two' is no number of devices",
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_wrong_is_said_with_its_line(text: str, message: str) -> None:
    with pytest.raises(HloError) as problem:
        read(text.replace("@", ENTRY).replace("#", OTHER), "f")
    assert str(problem.value) == f"f: {message}"


def test_what_is_wrong_is_said_in_one_line_after_the_name_of_the_text() -> None:
    empty = f"empty: HLO text starts with HloModule; {HOW}"
    for arguments, says in ((("", " "), f" : {empty}"), (("", "a\nb"), f"a b: {empty}"), (("",), f"<text>: {empty}")):
        with pytest.raises(HloError) as problem:
            read(*arguments)
        assert str(problem.value) == says


def test_mlir_is_known_as_bytecode_too() -> None:
    for data in (b"ML\xefR\x0dMLIR", b'\n#loc = loc("x")\nmodule @jit_f {\n}', b"#loc1 = HloModule m"):
        with pytest.raises(HloError) as problem:
            read_bytes(data, "f")
        assert str(problem.value) == f"f: StableHLO (MLIR), not HLO: {HOW}"


def test_half_a_character_of_another_encoding_is_no_error() -> None:
    text = "HloModule m // \ud800\nENTRY main {\n  ROOT p = f32[] parameter(0)\n}\n"
    assert read(text) == read("\ufeff" + text) == Module("m", 1, [])
