"""The vocabulary of communication: executions, bytes, and records that come back from JSON unchanged."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardiff.record import BITS, OPS, PHASES, Executions, Part, Record, record, totals, wire_bytes, wire_factor

counts = st.integers(0, 10)
executions = st.builds(
    lambda least, more: Executions(least, None if more is None else least + more), counts, st.none() | counts
)
ranks = st.integers(0, 7)
records = st.builds(
    Record,
    op=st.sampled_from(OPS),
    dtype=st.sampled_from(tuple(BITS)),
    payload_bytes=st.integers(0, 2**40),
    wire_bytes=st.integers(0, 2**40),
    axis=st.none() | st.sampled_from(("dp", "tp", "pp")),
    group_size=st.none() | st.integers(1, 8),
    groups=st.none() | st.lists(st.lists(ranks).map(tuple)).map(tuple),
    edges=st.none() | st.lists(st.tuples(ranks, ranks)).map(tuple),
    executions=executions,
    phase=st.sampled_from(PHASES),
    is_async=st.booleans(),
    name=st.none() | st.text(),
    computation=st.none() | st.text(),
    source=st.none() | st.text(),
    flags=st.lists(st.text()).map(tuple),
    detail=st.none() | st.text(),
    parts=st.lists(st.builds(Part, dtype=st.sampled_from(tuple(BITS)), bytes=st.integers(0, 2**40))).map(tuple),
    root=st.none() | ranks,
    shape=st.none() | st.lists(ranks).map(tuple),
)


def test_nested_executions_multiply():
    assert Executions(3, 3) * Executions(2, 5) == Executions(6, 15)
    assert Executions(0, 1) * Executions(4, 4) == Executions(0, 4)  # a conditional around a loop
    assert Executions(2, None) * Executions(3, 3) == Executions(6, None)
    assert Executions(0, None) * Executions(1, 1) == Executions(0, None)


def test_what_never_runs_bounds_what_is_inside_it():
    assert Executions(0, 0) * Executions(5, None) == Executions(0, 0)
    assert Executions(1, None) * Executions(0, 0) == Executions(0, 0)


def test_successive_executions_add():
    assert Executions(3, 3) + Executions(0, 1) == Executions(3, 4)
    assert Executions(1, None) + Executions(2, 2) == Executions(3, None)


@given(executions, executions, executions)
def test_executions_form_a_semiring(a, b, c):
    assert a * b == b * a and a + b == b + a
    assert (a * b) * c == a * (b * c) and (a + b) + c == a + (b + c)
    assert a * Executions(1, 1) == a == a + Executions(0, 0)
    assert a * (b + c) == a * b + a * c


FACTORS = {  # for 4 ranks
    "all_reduce": Fraction(3, 2),
    "all_gather": Fraction(3, 4),
    "reduce_scatter": Fraction(3, 4),
    "all_to_all": Fraction(3, 4),
    "gather": Fraction(3, 4),
    "scatter": Fraction(3, 4),
    "collective_permute": Fraction(1),
    "broadcast": Fraction(1),
    "reduce": Fraction(1),
}


@pytest.mark.parametrize("op", OPS)
def test_wire_factor(op):
    assert wire_factor(op, 4) == FACTORS[op]
    assert wire_factor(op, 1) == 0
    assert wire_bytes(op, 1000, 4) == 1000 * FACTORS[op]


@pytest.mark.parametrize("group_size", range(1, 10))
def test_an_all_reduce_sends_what_a_reduce_scatter_and_an_all_gather_send(group_size):
    parts = wire_factor("reduce_scatter", group_size) + wire_factor("all_gather", group_size)
    assert wire_factor("all_reduce", group_size) == parts


def test_wire_bytes_are_whole():
    assert wire_bytes("all_reduce", 4, 3) == 5  # 16 / 3
    assert wire_bytes("all_gather", 2**60 + 1, 2) == 2**59  # exact where a float would not be


def test_a_permute_needs_no_group_size_and_others_do():
    assert wire_factor("collective_permute", None) == 1
    with pytest.raises(ValueError, match="all_reduce needs a group size"):
        wire_factor("all_reduce", None)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        wire_factor("all_gather", 0)
    with pytest.raises(ValueError, match="^unknown op 'all_sum'; known: all_reduce, all_gather, .*, scatter$"):
        wire_factor("all_sum", 2)


def test_record_fills_in_the_wire_bytes():
    made = record("all_gather", "float32", 64, 4, axis="tp", phase="forward")
    assert made == Record("all_gather", "float32", 64, 48, axis="tp", group_size=4, phase="forward")


@given(records)
def test_a_record_comes_back_from_json_unchanged(one):
    assert Record.from_json(json.loads(json.dumps(one.to_json()))) == one


NO_RECORD = {
    "op": ["all_sum", None, 1, ["all_reduce"]],
    "dtype": [None, 4],
    "payload_bytes": [-1, 1.0, True, "8", None],
    "wire_bytes": [-1, 1.0, False, None],
    "axis": [1, ["dp"]],
    "group_size": [0, -1, 2.0, True, "2"],
    "groups": [0, [1], [[-1]], [["0"]], {}],
    "edges": [[[0]], [[0, 1, 2]], [[0, -1]], [0], "01"],
    "executions": [1, [1, 1], {"most": 1}, {"min": -1}, {"min": None}, {"max": -1}, {"min": 1, "max": 1.5}],
    "phase": [None, "later", 1],
    "is_async": [1, None, "true"],
    "name": [1],
    "computation": [1],
    "source": [1],
    "flags": [None, "promoted", [1], {}],
    "detail": [1],
    "parts": [None, 4, [4], [{}], [{"dtype": "float32", "bytes": -4}], [{"dtype": "int8", "bytes": 1, "size": 1}]],
    "root": [-1, 1.0, True, "0"],
    "shape": [4, "4", [-1], [1.0], [[1]]],
    "moves": ["weights", 1],
    "reduction": [1, ["sum"]],
    "colour": ["red", None],
}


@pytest.mark.parametrize("name", NO_RECORD)
def test_what_is_no_record_is_refused_by_the_field_that_is_wrong(name):
    good = record("all_gather", "float32", 64, 4).to_json()
    for value in NO_RECORD[name]:
        with pytest.raises(ValueError, match=f"^{name} of a record cannot be "):
            Record.from_json({**good, name: value})
    for lacking in ("op", "dtype", "payload_bytes", "wire_bytes"):
        few = {key: value for key, value in good.items() if key != lacking}
        with pytest.raises(ValueError, match="^a record has at least op, dtype, payload_bytes and wire_bytes$"):
            Record.from_json(few)


def test_a_long_value_is_cut_short_where_it_is_refused():
    good = record("all_gather", "float32", 64, 4).to_json()
    with pytest.raises(ValueError, match=f"^op of a record cannot be '{'x' * 40}'$"):
        Record.from_json({**good, "op": "x" * 50})
    with pytest.raises(ValueError, match=f"^{'y' * 40} of a record cannot be '1'$"):
        Record.from_json({**good, "y" * 50: 1})
    for value, shown in (
        (2**63, "a number beyond 2[*][*]63"),
        (-(2**63), "a number beyond 2[*][*]63"),
        (-5000, "-5000"),
    ):
        with pytest.raises(ValueError, match=f"^wire_bytes of a record cannot be '{shown}'$"):
            Record.from_json({**good, "wire_bytes": value})
    with pytest.raises(ValueError, match="^a record has at least"):
        Record.from_json([good])  # type: ignore[arg-type]


def test_everything_that_a_record_has_comes_back_from_lists():
    one = Record(
        *("collective_permute", "bfloat16", 2**63 - 1, 0, "pp", 2),
        groups=((0, 1), (2, 3)),
        edges=((0, 1),),
        executions=Executions(2, None),
        phase="backward",
        is_async=True,
        name="n",
        computation="c",
        source="f.py:1",
        flags=("promoted",),
        detail="loss",
        parts=(Part("bfloat16", 1), Part("float32", 2, (1,), "gradient", "w0")),
        root=1,
        shape=(3, 0),
        moves="activation",
    )
    fields = json.loads(json.dumps(one.to_json()))
    assert Record.from_json(fields) == one
    with pytest.raises(ValueError, match="^wire_bytes of a record cannot be "):
        Record.from_json({**fields, "wire_bytes": 2**63})


def test_what_a_record_leaves_out_is_what_a_record_leaves_out():
    few = {"op": "all_gather", "dtype": "float32", "payload_bytes": 64, "wire_bytes": 48}
    assert Record.from_json(few) == Record(**few)
    assert Record.from_json({**few, "executions": {"max": None}}).executions == Executions(1, None)
    assert Record.from_json({**few, "executions": {"min": 0}}).executions == Executions(0, 1)


def test_totals_weigh_by_executions():
    loop, branch = Executions(3, 3), Executions(0, 1)
    some = [
        record("all_gather", "float32", 64, 4, executions=loop),
        record("all_reduce", "float32", 8, 4, executions=branch),
        record("collective_permute", "float32", 10, None),
    ]
    assert totals(some) == {
        "records": 3,
        "calls": {"min": 4, "max": 5},
        "payload_bytes": {"min": 202, "max": 210},
        "wire_bytes": {"min": 154, "max": 166},
    }


def test_totals_of_an_unknown_number_are_unknown():
    unknown = totals([record("all_reduce", "float32", 8, 2, executions=Executions(1, None))])
    assert unknown["calls"] == {"min": 1, "max": None}
    assert unknown["payload_bytes"] == unknown["wire_bytes"] == {"min": 8, "max": None}
    alone = totals([record("all_reduce", "float32", 8, 1, executions=Executions(0, None))])
    assert alone["wire_bytes"] == {"min": 0, "max": 0}  # whatever the number, nothing is sent
    never = totals([record("all_reduce", "float32", 8, 2, executions=Executions(0, 0))])
    assert never["calls"] == never["wire_bytes"] == {"min": 0, "max": 0}
    assert totals([]) == {"records": 0, **dict.fromkeys(("calls", "payload_bytes", "wire_bytes"), {"min": 0, "max": 0})}
