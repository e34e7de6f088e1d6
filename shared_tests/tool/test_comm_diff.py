"""The alignment of records: every rule by a small example, and what holds for any two programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardiff.diff.alignment import subset_with_sum
from shardiff.diff.rules import WHY, Row, align, sentence, step_bytes, unexplained
from shardiff.record import OPS, PHASES, Executions, Part, Record, record


def rec(op: str, size: int, phase: str = "backward", n: int = 4, dtype: str = "float32", **fields: Any) -> Record:
    fields["parts"] = tuple(Part(dtype, part) for part in fields.get("parts", ()))
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
        (
            {"combined", "dtype"},
            [rec("all_reduce", 64), rec("all_reduce", 32)],
            [rec("all_reduce", 48, dtype="bfloat16")],
        ),
        ({"combined", "moved"}, [rec("all_reduce", 64, "forward"), rec("all_reduce", 32)], [rec("all_reduce", 96)]),
        (
            {"regrouped", "loop"},
            [rec("all_reduce", 48, executions=Executions(2, 2))],
            [rec("all_reduce", 64), rec("all_reduce", 32)],
        ),
        ({"split"}, [rec("all_gather", 96)], [rec("all_gather", 64), rec("all_gather", 32)]),
        ({"regrouped"}, [rec("all_reduce", 64), rec("all_reduce", 32)], [rec("all_reduce", 48), rec("all_reduce", 48)]),
        ({"loop"}, [rec("all_gather", 64)] * 3, [rec("all_gather", 64, executions=Executions(3, 3))]),
        ({"loop"}, [permute(8, [(0, 1)])] * 2, [permute(8, [(0, 1)], times=2)]),
        ({"loop"}, [permute(8, [(0, 1)]), permute(8, [(1, 2)])], [permute(8, [(0, 1), (1, 2)], times=2)]),
        ({"regrouped"}, [rec("all_reduce", s) for s in (64, 32, 4)], [rec("all_reduce", s) for s in (48, 52)]),
        (
            {"regrouped", "dtype"},
            [rec("all_reduce", 64), rec("all_reduce", 32)],
            [rec("all_reduce", 40, dtype="bfloat16"), rec("all_reduce", 8, dtype="bfloat16")],
        ),
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


@pytest.mark.parametrize(
    ("explicit", "derived"),
    [
        ([rec("all_reduce", 64), rec("all_reduce", 32)], [rec("all_reduce", 48), rec("all_reduce", 50)]),
        ([rec("all_reduce", 64), rec("all_reduce", 32, n=2)], [rec("all_reduce", 96)]),  # groups of two sizes
        ([rec("all_reduce", 64), rec("all_reduce", 32, dtype="bfloat16")], [rec("all_reduce", 96)]),  # of two types
        ([rec("all_reduce", 64, executions=Executions(3, 3))], [rec("all_reduce", 192)]),  # one instruction each
        ([rec("reduce_scatter", 64)], [rec("all_reduce", 64, n=2)]),
        ([rec("all_gather", 64, "update")], [rec("all_gather", 64)] * 2),  # no gather of the forward pass again
        ([rec("all_reduce", 64, "forward")], [rec("all_gather", 64)]),
    ],
    ids=str,
)
def test_what_only_looks_alike_is_not_explained(explicit, derived):
    assert unexplained(align(explicit, derived)) > 0


def test_what_is_matched_is_not_matched_again():
    one = rec("all_reduce", 96)
    rows = align([one, rec("all_reduce", 64), rec("all_reduce", 32)], [one])
    assert [row.verdict for row in rows] == ["same", "only explicit", "only explicit"]
    rows = align([rec("reduce_scatter", 64)] * 2, [rec("all_reduce", 64)])
    assert [row.verdict for row in rows] == ["rewritten", "only explicit"]
    rows = align([rec("reduce_scatter", 100), rec("reduce_scatter", 64)], [rec("all_reduce", 64)])
    assert [(row.verdict, row.explicit) for row in rows] == [("rewritten", (1,)), ("only explicit", (0,))]


PREFERRED = {
    "the same edges before others": (
        [permute(8, [(0, 1)]), permute(8, [(1, 2)])],
        [permute(8, [(1, 2)]), permute(8, [(0, 1)])],
        [(), ()],
    ),
    "the same type before as many elements": (
        [rec("all_reduce", 64), rec("all_reduce", 32, dtype="bfloat16")],
        [rec("all_reduce", 32, dtype="bfloat16"), rec("all_reduce", 64)],
        [(), ()],
    ),
    "another type before another phase": (
        [rec("all_reduce", 64, "forward"), rec("all_reduce", 64, "backward")],
        [rec("all_reduce", 32, phase, dtype="bfloat16") for phase in ("backward", "forward")],
        [("dtype",), ("dtype",)],
    ),
}


@pytest.mark.parametrize("preference", PREFERRED)
def test_what_is_more_alike_is_matched_first(preference):
    explicit, derived, rules = PREFERRED[preference]
    rows = align(explicit, derived)
    assert [(row.explicit, row.derived) for row in rows] == [((0,), (1,)), ((1,), (0,))]
    assert [row.rules for row in rows] == rules


def test_sums_within_a_phase_come_before_sums_across_phases():
    explicit = [rec("all_reduce", 64, "forward"), rec("all_reduce", 32, "backward"), rec("all_reduce", 32, "forward")]
    rows = align(explicit, [rec("all_reduce", 96, "forward"), rec("all_reduce", 32, "update")])
    assert [(row.explicit, row.derived, row.rules) for row in rows] == [
        ((0, 2), (0,), ("combined",)),
        ((1,), (1,), ("moved",)),
    ]


def test_edges_that_are_not_known_are_no_difference():
    assert only_row([permute(8, [(0, 1)])], [rec("collective_permute", 8, "forward")]).verdict == "same"


def test_gathers_again_are_of_one_gather_each():
    forward, backward = rec("all_gather", 64, "forward"), rec("all_gather", 64, "backward")
    rows = align([forward, forward], [forward, forward, backward, backward])
    assert [(row.derived, row.rules) for row in rows] == [((0, 2), ("gathered_again",)), ((1, 3), ("gathered_again",))]
    twice = replace(backward, executions=Executions(2, 2))
    assert only_row([forward], [twice]).rules == ("loop", "moved", "gathered_again")


def test_a_gather_more_in_the_forward_pass_is_no_gather_again():
    one = rec("all_gather", 64, "forward")
    assert [row.verdict for row in align([one], [one, one])] == ["same", "only derived"]


def test_the_source_of_what_is_unexplained_is_named():
    (row,) = align([], [rec("all_to_all", 64, source="model.py:7")])
    assert row.why == "all_to_all of 64 bytes at model.py:7, which no rule explains"
    (row,) = align([rec("all_to_all", 6400)], [])
    assert row.why == "all_to_all of 6,400 bytes, which no rule explains"
    assert row.to_json() == {
        "verdict": "only explicit",
        "rule": None,
        "explicit": (0,),
        "derived": (),
        "bytes": {"explicit": 4800, "derived": 0},
        "why": row.why,
    }


def test_all_parts_and_executions_that_are_left_over_count():
    (row,) = align([rec("all_reduce", 80, parts=(64, 16), executions=Executions(3, 3))], [])
    assert row.bytes == {"explicit": 3 * 120, "derived": 0}
    rows = align([rec("all_reduce", 80, parts=(64, 16), executions=Executions(3, 3))], [rec("all_reduce", 64)])
    assert [(row.verdict, row.bytes) for row in rows] == [
        ("rewritten", {"explicit": 3 * 120, "derived": 96}),
        ("only explicit", {"explicit": 2 * 96 + 3 * 24, "derived": 0}),
    ]


def test_a_row_says_what_became_of_its_records():
    explicit = [rec("reduce_scatter", 64), rec("reduce_scatter", 32)]
    row = only_row(explicit, [rec("all_reduce", 48, "forward", dtype="bfloat16", parts=(16, 32))])
    assert row.to_json()["rule"] == "unfused_reduce_scatter+combined+dtype+moved"
    assert row.why == ". ".join(
        [
            WHY["unfused_reduce_scatter"],
            WHY["combined"],
            "another type on the wire: bfloat16 instead of float32",
            "in another phase: when, not what; backward as written, forward as derived",
        ]
    )


def test_all_types_and_phases_of_a_row_are_named():
    explicit = [rec("all_reduce", 8, "forward"), rec("all_reduce", 8, "backward", dtype="bfloat16")]
    assert sentence("dtype", explicit, explicit[:1]) == WHY["dtype"] + ": float32 instead of bfloat16/float32"
    assert sentence("moved", explicit[1:], explicit) == (
        WHY["moved"] + "; backward as written, backward/forward as derived"
    )
    assert sentence("edges", explicit, explicit) == WHY["edges"]


def test_within_a_phase_comes_before_across_phases():
    forward, backward = rec("all_reduce", 64, "forward"), rec("all_reduce", 64, "backward")
    rows = align([forward, backward], [backward, forward])
    assert [(row.verdict, row.explicit, row.derived) for row in rows] == [("same", (0,), (1,)), ("same", (1,), (0,))]


def test_bytes_of_a_step_are_wire_bytes_as_often_as_they_are_sent():
    loop, endless, perhaps = Executions(3, 3), Executions(2, None), Executions(0, None)
    assert step_bytes([rec("all_gather", 64)]) == 48  # 3/4 of it, on 4 ranks
    assert step_bytes([rec("all_gather", 64, executions=loop), rec("all_reduce", 8)]) == 3 * 48 + 12
    assert step_bytes([rec("all_gather", 64, executions=endless)]) == 2 * 48  # the least that is known,
    assert step_bytes([rec("all_gather", 64, executions=perhaps)]) == 48  # and at least once
    assert step_bytes([rec("all_gather", 64, executions=Executions(1, 4))]) == 4 * 48  # the most that can be
    assert step_bytes([]) == 0


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


def halved(r: Record) -> Record:
    return rec(r.op, r.payload_bytes // 2, r.phase, dtype="bfloat16")


# Rewrites of one record, and the rules that must tell of each.
REWRITES = {
    (): ("all_reduce", lambda r: [r]),
    ("dtype",): ("all_gather", lambda r: [halved(r)]),
    ("moved",): ("all_reduce", lambda r: [replace(r, phase="update")]),
    ("dtype", "moved"): ("all_to_all", lambda r: [replace(halved(r), phase="update")]),
    ("unfused_reduce_scatter",): ("reduce_scatter", lambda r: [rec("all_reduce", r.payload_bytes, r.phase)]),
    ("fused_reduce_scatter",): ("all_reduce", lambda r: [rec("reduce_scatter", r.payload_bytes, r.phase)]),
    ("unfused_reduce_scatter", "dtype"): (
        "reduce_scatter",
        lambda r: [halved(rec("all_reduce", r.payload_bytes, r.phase))],
    ),
    ("decomposed_all_reduce",): (
        "all_reduce",
        lambda r: [rec(op, r.payload_bytes, r.phase) for op in ("all_gather", "reduce_scatter")],
    ),
    ("gather_by_sum",): ("all_gather", lambda r: [rec("all_reduce", r.payload_bytes, r.phase)]),
    ("broadcast_by_sum",): ("broadcast", lambda r: [rec("all_reduce", r.payload_bytes, r.phase)]),
    ("split",): ("all_to_all", lambda r: [rec(r.op, r.payload_bytes * part // 4, r.phase) for part in (1, 3)]),
}


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(list(REWRITES)), st.sampled_from(["forward", "backward"])), max_size=9),
    st.data(),
)
def test_a_program_rewritten_record_by_record_is_told_by_just_those_rules(rewrites, data):
    """The sizes are powers of five, so that no sum of some is another; what is derived comes in any order."""
    written = [rec(REWRITES[rules][0], 64 * 5**i, phase) for i, (rules, phase) in enumerate(rewrites)]
    sources = [(i, r) for i, (rules, _) in enumerate(rewrites) for r in REWRITES[rules][1](written[i])]
    sources = data.draw(st.permutations(sources))
    rows = align(written, [r for _, r in sources])
    assert [row.explicit for row in rows] == [(i,) for i in range(len(written))]
    for row, (rules, _) in zip(rows, rewrites, strict=True):
        assert row.rules == rules
        assert row.verdict == ("rewritten" if rules else "same")
        assert list(row.derived) == [j for j, (i, _) in enumerate(sources) if (i,) == row.explicit]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.sampled_from(["all_gather", "all_reduce"]), st.data())
def test_what_is_combined_by_operands_or_in_sum_is_told_as_combined(sizes, op, data):
    written = [rec(op, 4 * size) for size in sizes]
    parts = tuple(data.draw(st.permutations([4 * size for size in sizes])))
    for whole in (rec(op, sum(parts)), rec(op, sum(parts), parts=parts)):
        row = only_row(written, [whole])
        assert (row.rules, row.explicit, row.derived) == (("combined",), tuple(range(len(sizes))), (0,))
        row = only_row([whole], written)
        assert (row.rules, row.explicit, row.derived) == (("split",), (0,), tuple(range(len(sizes))))


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


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.data())
def test_a_run_of_neighbours_is_found_among_however_many(sizes, data):
    start = data.draw(st.integers(0, len(sizes) - 1))
    end = data.draw(st.integers(start + 1, len(sizes)))
    found = subset_with_sum(sizes, sum(sizes[start:end]))
    assert sum(sizes[i] for i in found) == sum(sizes[start:end]) and found == list(range(found[0], found[-1] + 1))


def test_any_subset_is_found_among_few():
    for count, found in ((24, [0, 2]), (25, [])):
        sizes = [1000.0, 1.0, 2000.0] + [10.0] * (count - 3)
        assert subset_with_sum(sizes, 3000.0) == found
    assert subset_with_sum([1000.0, 1.0, 2000.0, 10.0], 3000.0, most=3) == []


def test_thousands_of_records_are_aligned_in_linear_passes():
    program = [rec("all_reduce", 4 * i, phase) for i in range(1, 1500) for phase in ("forward", "backward")]
    assert unexplained(align(program, program[::-1])) == 0
