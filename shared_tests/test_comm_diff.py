"""The alignment of records: every rule by a small example, and what holds for any two programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.alignment import subset_with_sum
from benchmarks.comm_diff import WHY, Row, align, step_bytes, unexplained
from contract.communication import OPS, PHASES, Executions, Record, record


def rec(op: str, size: int, phase: str = "backward", n: int = 4, dtype: str = "float32", **fields: object) -> Record:
    return record(op, dtype, size, None if op == "collective_permute" else n, phase=phase, **fields)


def permute(size: int, edges: list[tuple[int, int]], phase: str = "forward", times: int = 1) -> Record:
    return rec("collective_permute", size, phase, edges=tuple(edges), executions=Executions(times, times))


def only_row(explicit: list[Record], derived: list[Record]) -> Row:
    rows = align(explicit, derived)
    assert len(rows) == 1, rows
    return rows[0]


def test_equal_records_are_the_same():
    row = only_row([rec("all_reduce", 64)], [rec("all_reduce", 64)])
    assert (row.verdict, row.rules, row.why) == ("same", (), "the same op, group and bytes")


@pytest.mark.parametrize(
    "rules, explicit, derived",
    [
        ({"unfused_reduce_scatter"}, [rec("reduce_scatter", 64)], [rec("all_reduce", 64)]),
        ({"fused_reduce_scatter"}, [rec("all_reduce", 64)], [rec("reduce_scatter", 64)]),
        ({"decomposed_all_reduce"}, [rec("all_reduce", 64)], [rec("reduce_scatter", 64), rec("all_gather", 64)]),
        ({"recomposed_all_reduce"}, [rec("reduce_scatter", 64), rec("all_gather", 64)], [rec("all_reduce", 64)]),
        ({"gather_by_sum"}, [rec("all_gather", 64)], [rec("all_reduce", 64)]),
        ({"broadcast_by_sum"}, [rec("broadcast", 64)], [rec("all_reduce", 64)]),
        ({"combined"}, [rec("all_reduce", 64), rec("all_reduce", 32)], [rec("all_reduce", 96)]),
        ({"combined"}, [rec("all_reduce", 64), rec("all_reduce", 4)], [rec("all_reduce", 68, parts=(4, 64))]),
        ({"split"}, [rec("all_gather", 96)], [rec("all_gather", 64), rec("all_gather", 32)]),
        ({"regrouped"}, [rec("all_reduce", 64), rec("all_reduce", 32)], [rec("all_reduce", 48), rec("all_reduce", 48)]),
        ({"loop"}, [rec("all_gather", 64)] * 3, [rec("all_gather", 64, executions=Executions(3, 3))]),
        ({"loop"}, [permute(8, [(0, 1)])] * 2, [permute(8, [(0, 1)], times=2)]),
        ({"dtype"}, [rec("all_gather", 64)], [rec("all_gather", 32, dtype="bfloat16")]),
        ({"dtype", "unfused_reduce_scatter"}, [rec("reduce_scatter", 64)], [rec("all_reduce", 32, dtype="bfloat16")]),
        ({"moved"}, [rec("all_reduce", 4, "forward")], [rec("all_reduce", 4, "backward")]),
        ({"edges"}, [permute(8, [(0, 1)])], [permute(8, [(0, 1), (1, 0)])]),
        (
            {"gathered_again"},
            [rec("all_gather", 64, "forward")],
            [rec("all_gather", 64, "forward"), rec("all_gather", 64, "backward")],
        ),
        (
            {"gathered_again", "dtype"},
            [rec("all_gather", 64, "forward")],
            [rec("all_gather", 64, "forward"), rec("all_gather", 32, "backward", dtype="bfloat16")],
        ),
        ({"loop", "bubble_ticks"}, [permute(8, [(0, 1)])] * 2, [permute(8, [(0, 1)], times=3)]),
    ],
)
def test_a_rewrite_is_found_under_its_rule(rules, explicit, derived):
    row = only_row(explicit, derived)
    assert (row.verdict, set(row.rules)) == ("rewritten", rules)
    assert row.bytes == {"explicit": step_bytes(explicit), "derived": step_bytes(derived)}
    for rule in rules:
        assert WHY[rule] in row.why


@pytest.mark.parametrize(
    "explicit, derived",
    [
        (rec("all_reduce", 64), rec("all_reduce", 65)),
        (rec("all_reduce", 64), rec("all_reduce", 64, n=2)),
        (rec("all_to_all", 64), rec("all_gather", 64)),
        (rec("all_reduce", 64), rec("all_gather", 64)),
        (permute(8, [(0, 1)]), permute(9, [(0, 1)])),
    ],
)
def test_what_no_rule_explains_is_listed_on_both_sides_with_its_bytes(explicit, derived):
    rows = align([explicit], [derived])
    assert [row.verdict for row in rows] == ["only explicit", "only derived"]
    assert unexplained(rows) == 2
    assert [row.bytes for row in rows] == [
        {"explicit": explicit.wire_bytes, "derived": 0},
        {"explicit": 0, "derived": derived.wire_bytes},
    ]


def test_a_gather_more_in_the_forward_pass_is_no_gather_again():
    one = rec("all_gather", 64, "forward")
    assert [row.verdict for row in align([one], [one, one])] == ["same", "only derived"]


def test_the_source_of_what_is_unexplained_is_named():
    (row,) = align([], [rec("all_to_all", 64, source="model.py:7")])
    assert row.why == "all_to_all of 64 bytes at model.py:7, which no rule explains"


def test_within_a_phase_comes_before_across_phases():
    forward, backward = rec("all_reduce", 64, "forward"), rec("all_reduce", 64, "backward")
    rows = align([forward, backward], [backward, forward])
    assert [(row.verdict, row.explicit, row.derived) for row in rows] == [("same", (0,), (1,)), ("same", (1,), (0,))]


def test_rows_have_the_schema():
    row = only_row([rec("reduce_scatter", 64)], [rec("all_reduce", 64)]).to_json()
    assert list(row) == ["verdict", "rule", "explicit", "derived", "bytes", "why"]
    assert row["rule"] == "unfused_reduce_scatter"
    assert only_row([rec("all_reduce", 64)], [rec("all_reduce", 64)]).to_json()["rule"] is None


records = st.builds(
    rec,
    st.sampled_from(OPS),
    st.sampled_from([0, 4, 8, 12, 64, 100]),
    st.sampled_from(PHASES),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["float32", "bfloat16"]),
    executions=st.sampled_from([Executions(1, 1), Executions(3, 3), Executions(0, 1), Executions(1, None)]),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(records, max_size=8), st.lists(records, max_size=8))
def test_no_byte_is_lost_or_counted_twice(explicit, derived):
    """Every record is in a row, and the rows' bytes add up to the programs'; a part left over has a row of its own."""
    rows = align(explicit, derived)
    for side, program in (("explicit", explicit), ("derived", derived)):
        seen = [i for row in rows for i in getattr(row, side)]
        assert sorted(set(seen)) == list(range(len(program)))
        matched = [row for row in rows if not row.verdict.startswith("only")]
        assert len({i for row in matched for i in getattr(row, side)}) == sum(len(getattr(r, side)) for r in matched)
        if len(seen) == len(set(seen)):
            assert sum(row.bytes[side] for row in rows) == step_bytes(program)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(records, max_size=8), st.randoms(use_true_random=False))
def test_a_program_is_the_same_as_itself_in_any_order(program, random):
    shuffled = [replace(r, name=str(i)) for i, r in enumerate(program)]
    random.shuffle(shuffled)
    assert {row.verdict for row in align(program, shuffled)} <= {"same"}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 50), max_size=40), st.data())
def test_a_subset_has_the_sum_that_it_was_chosen_for(sizes, data):
    chosen = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True)) if sizes else []
    target = sum(sizes[i] for i in chosen)
    found = subset_with_sum(sizes, target)
    assert len(set(found)) == len(found)
    assert sum(sizes[i] for i in found) == target or (len(sizes) > 24 and found == [])


def test_thousands_of_records_are_aligned_in_linear_passes():
    program = [rec("all_reduce", 4 * i, phase) for i in range(1, 1500) for phase in ("forward", "backward")]
    assert unexplained(align(program, program[::-1])) == 0
