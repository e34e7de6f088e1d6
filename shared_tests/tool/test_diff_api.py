"""The diff of two programs as an object: its answers, what it prints and raises, and the programs that it compares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardiff.cli import main as cli
from shardiff.diff import Diff, diff
from shardiff.mesh import Mesh, parse
from shardiff.program import Program
from shardiff.record import Executions, Part, record

DP, TP = ((0, 2), (1, 3)), ((0, 1), (2, 3))
LEFT = Program((record("all_reduce", "float32", 64, 4), record("all_reduce", "float32", 32, 4)), "written")
RIGHT = Program((record("all_reduce", "float32", 96, 4), record("all_to_all", "float32", 8, 4)), "derived")


def test_a_diff_counts_what_is_unexplained_and_the_bytes_beyond():
    found = diff(LEFT, RIGHT)
    assert [row.verdict for row in found.rows] == ["rewritten", "only right"]
    assert (found.unexplained, found.extra_bytes) == (1, 6)
    assert found.fails("unexplained") and found.fails("extra-bytes") and not found.fails(None)
    back = diff(RIGHT, LEFT)
    assert (back.unexplained, back.extra_bytes, back.fails("extra-bytes")) == (1, -6, False)
    with pytest.raises(ValueError, match="^unknown fail-on 'x'; known: unexplained, extra-bytes$"):
        found.fails("x")


def test_asserting_that_programs_are_the_same_raises_the_table():
    found = diff(LEFT, replace(RIGHT, records=RIGHT.records[:1]))
    found.assert_same(allow=("combined", "moved"))
    diff(LEFT, LEFT).assert_same()
    with pytest.raises(AssertionError) as raised:
        found.assert_same(allow=["moved"])
    assert str(raised.value) == f"the programs differ\n{found}"
    assert "2 x all_reduce" not in str(found) and "all_reduce 96 B" in str(found) and "combined" in str(found)
    with pytest.raises(AssertionError):
        diff(LEFT, RIGHT).assert_same(allow=("combined",))  # a row that no rule explains is never allowed
    with pytest.raises(ValueError, match="^unknown rule 'combine'; known: unfused_reduce_scatter, "):
        found.assert_same(allow=("combine",))


def test_the_sides_are_called_by_their_labels():
    text = repr(diff(LEFT, RIGHT))
    assert "written" in text and "only derived" in text and "only right" not in text
    assert "written: in one step: 2 calls, payload 96 B, a rank sends 144 B" in text
    nameless = repr(diff(replace(LEFT, label=""), RIGHT))
    assert "only right" in nameless and "derived" not in nameless


def test_a_notebook_gets_a_table_in_which_nothing_of_the_program_is_markup():
    evil = Program((record("all_to_all", "float32", 8, 4, source="<b>x</b>.py:1"),), "<script>")
    html = diff(LEFT, evil)._repr_html_()
    assert html.startswith("<table") and html.count("<tr>") == 4
    assert "<script>" not in html and "&lt;script&gt;" in html and "<b>" not in html and "&lt;b&gt;x" in html


def test_a_diff_comes_back_from_json():
    program = Program(
        (
            record("all_gather", "float32+bool", 65, 2, parts=(Part("float32", 64), Part("bool", 1)), groups=DP),
            record("broadcast", "int8", 8, 2, root=1, groups=TP, executions=Executions(2, None)),
        ),
        "a",
        parse("dp=2,tp=2"),
        {"arguments": 4},
    )
    found = diff(program, replace(RIGHT, label="b"))
    document = json.loads(json.dumps(found.to_json()))
    assert (
        list(document) == ["schema", "left", "right", "rows", "unexplained", "extra_bytes"] and document["schema"] == 2
    )
    assert Diff.from_json(document) == found
    assert document["left"]["mesh"] == {"dp": 2, "tp": 2} and document["left"]["records"][0]["axis"] == "dp"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "a program has a list of records"),
        ([], "a program has a list of records"),
        ({"records": [{}]}, "a record has at least op"),
        ({"records": [], "mesh": {"dp": "2"}}, "mesh of a program must be sizes by name"),
        ({"records": [], "mesh": [2]}, "mesh of a program must be sizes by name"),
        ({"records": [], "memory": {"arguments": -1}}, "memory of a program must be sizes by name"),
    ],
)
def test_what_is_no_program_is_refused_in_one_line(fields, words):
    with pytest.raises(ValueError, match=words) as refusal:
        Program.from_json(fields)
    assert "\n" not in str(refusal.value)


def mapped(axes: object, left: str = "dp=2,tp=2", right: str = "tp=2,dp=2") -> Diff:
    """The same program with its ranks numbered in two ways: an all_reduce over each axis."""
    sides = [
        Program(tuple(record("all_reduce", "float32", s, 2, groups=g) for s, g in pairs), label, parse(mesh))
        for label, mesh, pairs in (("a", left, ((64, DP), (32, TP))), ("b", right, ((64, TP), (32, DP))))
    ]
    return diff(*sides, axes=axes)  # type: ignore[arg-type]


def test_one_mesh_maps_to_the_other_only_if_the_caller_says_so():
    assert {row.rules for row in mapped(None).rows} == {("other_ranks",)} and mapped(None).unexplained == 2
    mapped(True).assert_same()
    mapped({"dp": "data", "tp": "model"}, right="model=2,data=2").assert_same()
    assert mapped({"dp": "tp", "tp": "dp"}).unexplained == 2  # 64 bytes over the axis that the 32 bytes are over


@pytest.mark.parametrize(
    ("axes", "meshes", "words"),
    [
        ({"dp": "pp"}, {}, "no axis pp in the mesh tp=2,dp=2"),
        ({"pp": "dp"}, {}, "no axis pp in the mesh dp=2,tp=2"),
        (True, {"right": "x=2,y=2"}, "the meshes dp=2,tp=2 and x=2,y=2 have no axis in common"),
        (True, {"right": "dp=4,x=1"}, "the meshes dp=2,tp=2 and dp=4,x=1 have no axis in common"),
        ({"dp": "dp"}, {"right": "tp=1,dp=4"}, "axis dp cannot be axis dp: they have 2 and 4 ranks"),
    ],
)
def test_a_map_that_cannot_be_is_refused(axes, meshes, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        mapped(axes, **meshes)
    with pytest.raises(ValueError, match="^axes map one mesh to another: both programs need a mesh"):
        diff(LEFT, RIGHT, axes=True)


def test_the_command_takes_the_meshes_of_two_files(tmp_path: Path, capsys):
    for name, groups in (("a.json", (DP, TP)), ("b.json", (TP, DP))):
        records = [record("all_reduce", "float32", s, 2, groups=g).to_json() for s, g in zip((64, 32), groups)]
        (tmp_path / name).write_text(json.dumps({"records": records}))
    command = ["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--fail-on", "unexplained"]
    assert cli.main(command) == 1
    assert "other ranks" in capsys.readouterr().out
    assert cli.main([*command, "--left-mesh", "dp=2,tp=2", "--right-mesh", "tp=2,dp=2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [document[side]["label"] for side in ("left", "right")] == ["a.json", "b.json"]
    assert [record["axis"] for record in document["right"]["records"]] == ["dp", "tp"]
    assert cli.main([*command, "--left-mesh", "dp"]) == 2
    assert cli.main(["diff", "data_parallel", "--left-mesh", "dp=2"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_mesh_of_one_axis_names_what_runs_along_it():
    program = Program((record("all_reduce", "float32", 64, 4, groups=((0, 1, 2, 3),)),), mesh=Mesh((("tp", 4),)))
    assert [one.axis for one in program] == ["tp"]


def test_totals_of_a_program_count_unknown_trips_at_least_once():
    endless = record("all_gather", "float32", 64, 4, executions=Executions(0, None))
    program = Program((endless, *LEFT.records))
    assert (program.payload_bytes, program.wire_bytes) == (160, 48 + 144)
    assert program.counts() == {"all_gather": 1, "all_reduce": 2}


def test_what_is_no_program_is_not_compared():
    program = Program((), "a")
    for sides in ((program, 3), ("hlo.txt", program)):
        with pytest.raises(ValueError, match=r"^diff compares two Programs, got (int|str); shardiff.read, compile and"):
            diff(*sides)  # type: ignore[arg-type]


def test_the_table_says_which_ranks_which_reduction_and_how_many_ranks_where_these_differ():
    def program(label: str, groups: Any, **fields: Any) -> Program:
        return Program((record("all_reduce", "float32", 64, len(groups[0]), groups=groups, **fields),), label)

    text = repr(diff(program("a", DP), program("b", TP)))
    assert "all_reduce 64 B, ranks 0,2 1,3" in text and "all_reduce 64 B, ranks 0,1 2,3" in text
    text = repr(diff(program("a", DP, reduction="sum"), program("b", DP, reduction="max")))
    assert "all_reduce(max) 64 B" in text and "but is all_reduce(max)." in text and "but is all_reduce(sum)." in text
    text = repr(diff(program("a", DP), program("b", ((0, 1),))))
    assert "The collectives of a are among 4 ranks, those of b among 2." in text


def test_a_loss_beside_the_gradients_is_told_as_its_bytes():
    written = record("all_reduce", "float32", 64, 4, phase="backward")
    parts = (Part("float32", 64), Part("float32", 4))
    compiled = replace(written, payload_bytes=68, wire_bytes=102, parts=parts, computation="main")
    text = repr(diff(Program((written,), "a"), Program((compiled,), "b")))
    assert "same, and 4 B of global value" in text
