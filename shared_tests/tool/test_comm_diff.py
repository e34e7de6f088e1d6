"""The alignment of records: what is matched first, and what holds for any two programs. Rules: test_diff_rules.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardiff.diff.alignment import cumulative, subset_with_sum
from shardiff.diff.rows import SAME, Row, align, extra_bytes, unexplained
from shardiff.diff.rules import WHY, labels, sentence
from shardiff.record import OPS, PHASES, Executions, Part, Record, record, step_bytes


def rec(op: str, size: int, phase: str = "backward", n: int = 4, dtype: str = "float32", **fields: Any) -> Record:
    """A record; parts: sizes, of the same type."""
    fields["parts"] = tuple(Part(dtype, part) for part in fields.get("parts", ()))
    return record(op, dtype, size, None if op == "collective_permute" else n, phase=phase, **fields)


def looped(one: Record, times: int) -> Record:
    """One instruction in a loop of a compiled program."""
    return replace(one, executions=Executions(times, times), computation="body")


def permute(size: int, edges: list[tuple[int, int]], phase: str = "forward", times: int = 1) -> Record:
    one = rec("collective_permute", size, phase, edges=tuple(edges))
    return looped(one, times) if times > 1 else one


def only_row(left: list[Record], right: list[Record]) -> Row:
    rows = align(left, right)
    assert len(rows) == 1, rows
    return rows[0]


def test_equal_records_are_the_same():
    row = only_row([rec("all_reduce", 64)], [rec("all_reduce", 64)])
    assert (row.verdict, row.rules, row.why) == ("same", (), SAME)


@pytest.mark.parametrize(
    "left, right",
    [
        (rec("all_reduce", 64), rec("all_reduce", 65)),
        (rec("all_reduce", 64), rec("all_reduce", 64, n=2)),
        (rec("all_to_all", 64), rec("all_gather", 64)),
        (rec("all_reduce", 64), rec("all_gather", 64)),
        (rec("all_reduce", 64, reduction="sum"), rec("all_reduce", 64, reduction="max")),
        (rec("broadcast", 64, root=0), rec("broadcast", 64, root=1)),
        (rec("all_gather", 64, moves="parameter"), rec("all_gather", 64, moves="activation")),
        (rec("all_gather", 64, dtype="int32"), rec("all_gather", 64)),
        (permute(8, [(0, 1)]), permute(9, [(0, 1)])),
    ],
    ids=str,
)
def test_what_no_rule_explains_is_listed_on_both_sides_with_its_bytes(left, right):
    rows = align([left], [right])
    assert [(row.verdict, row.left, row.right) for row in rows] == [
        ("only left", (left,), ()),
        ("only right", (), (right,)),
    ]
    assert unexplained(rows) == 2
    assert [row.bytes for row in rows] == [
        {"left": left.wire_bytes, "right": 0},
        {"left": 0, "right": right.wire_bytes},
    ]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([rec("all_reduce", 64), rec("all_reduce", 32)], [rec("all_reduce", 48), rec("all_reduce", 50)]),
        ([rec("all_reduce", 64), rec("all_reduce", 32, n=2)], [rec("all_reduce", 96)]),  # groups of two sizes
        ([rec("all_reduce", 64), rec("all_reduce", 32, dtype="bfloat16")], [rec("all_reduce", 96)]),  # of two types
        ([rec("all_reduce", 64, executions=Executions(3, 3))], [rec("all_reduce", 192)]),  # one instruction each
        ([rec("all_gather", 96, shape=(6, 4))], [rec("all_gather", s, shape=(s // 20, 5)) for s in (60, 36)]),
        ([rec("reduce_scatter", 64)], [rec("all_reduce", 64, n=2)]),
        ([rec("all_gather", 64, "update")], [rec("all_gather", 64)] * 2),  # no gather of the forward pass again
        ([rec("all_reduce", 64, "forward")], [rec("all_gather", 64)]),
    ],
    ids=range(8),
)
def test_what_only_looks_alike_is_not_explained(left, right):
    assert unexplained(align(left, right)) > 0


def test_what_is_matched_is_not_matched_again():
    one = rec("all_reduce", 96)
    rows = align([one, rec("all_reduce", 64), rec("all_reduce", 32)], [one])
    assert [row.verdict for row in rows] == ["same", "only left", "only left"]
    rows = align([rec("reduce_scatter", 64)] * 2, [rec("all_reduce", 64)])
    assert [row.verdict for row in rows] == ["rewritten", "only left"]
    several = [rec("reduce_scatter", 100), rec("reduce_scatter", 64)]
    rows = align(several, [rec("all_reduce", 64)])
    assert [(row.verdict, row.left) for row in rows] == [
        ("rewritten", (several[1],)),
        ("only left", (several[0],)),
    ]


OTHER, THIS = ((0, 2), (1, 3)), ((0, 1), (2, 3))
PREFERRED = {
    "the same edges before others": (
        [permute(8, [(0, 1)]), permute(8, [(1, 2)])],
        [permute(8, [(1, 2)]), permute(8, [(0, 1)])],
        [(), ()],
    ),
    "the same ranks before any others": (
        [rec("all_reduce", 64, n=2, groups=groups) for groups in (THIS, OTHER)],
        [rec("all_reduce", 64, n=2, groups=groups) for groups in (OTHER, THIS)],
        [(), ()],
    ),
    "the same shape before the same size": (
        [rec("all_reduce", 64, shape=shape) for shape in ((4, 4), (16,))],
        [rec("all_reduce", 64, shape=shape) for shape in ((16,), (4, 4))],
        [(), ()],
    ),
    "the same thing moved before the same size": (
        [rec("all_gather", 64, moves=what) for what in ("parameter", "activation")],
        [rec("all_gather", 64, moves=what) for what in (None, "parameter")],
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
    "within a phase before across phases": (
        [rec("all_reduce", 64, "forward"), rec("all_reduce", 64, "backward")],
        [rec("all_reduce", 64, "backward"), rec("all_reduce", 64, "forward")],
        [(), ()],
    ),
}


@pytest.mark.parametrize("preference", PREFERRED)
def test_what_is_more_alike_is_matched_first(preference):
    left, right, rules = PREFERRED[preference]
    rows = align(left, right)
    assert [(row.left, row.right) for row in rows] == [((left[0],), (right[1],)), ((left[1],), (right[0],))]
    assert [row.rules for row in rows] == rules


def test_sums_within_a_phase_come_before_sums_across_phases():
    left = [rec("all_reduce", 64, "forward"), rec("all_reduce", 32, "backward"), rec("all_reduce", 32, "forward")]
    right = [rec("all_reduce", 96, "forward"), rec("all_reduce", 32, "update")]
    rows = align(left, right)
    assert [(row.left, row.right, row.rules) for row in rows] == [
        ((left[0], left[2]), (right[0],), ("combined",)),
        ((left[1],), (right[1],), ("moved",)),
    ]


def test_edges_that_are_not_known_are_no_difference():
    assert only_row([permute(8, [(0, 1)])], [rec("collective_permute", 8, "forward")]).verdict == "same"


def test_the_source_of_what_is_unexplained_is_named():
    (row,) = align([], [rec("all_to_all", 64, source="model.py:7")])
    assert row.why == "all_to_all of 64 bytes at model.py:7, which no rule explains"
    (row,) = align([rec("all_to_all", 6400, executions=Executions(2, 2))], [])
    assert row.why == "all_to_all of 6,400 bytes, 2 times, which no rule explains"
    assert row.to_json() == {
        "verdict": "only left",
        "rules": [],
        "left": [row.left[0].to_json()],
        "right": [],
        "bytes": {"left": 9600, "right": 0},
        "why": row.why,
    }
    assert Row.from_json(row.to_json()) == row


def test_what_comes_closest_to_what_is_unexplained_is_named():
    left, right = align([rec("all_reduce", 64)], [rec("all_reduce", 68), rec("all_reduce", 6400)])[:2]
    assert left.why.endswith("no rule explains; the nearest right has 4 bytes more")
    assert right.why.endswith("no rule explains; the nearest left has 4 bytes fewer")
    left, _ = align([rec("all_reduce", 64)], [rec("all_reduce", 64, dtype="int32")], labels=("written", "derived"))
    assert left.why.endswith("; the nearest derived has the same number of bytes of int32")


def test_all_parts_and_executions_that_are_left_over_count_once():
    both = rec("all_reduce", 80, parts=(64, 16), executions=Executions(3, 3))
    (row,) = align([both], [])
    assert row.bytes == {"left": 3 * 120, "right": 0} and row.left == (both,)
    rows = align([both], [rec("all_reduce", 64)])
    assert [(row.verdict, row.bytes["left"]) for row in rows] == [
        ("same", 96),
        ("only left", 2 * 96),
        ("only left", 3 * 24),
    ]
    assert [[(r.payload_bytes, r.times) for r in row.left] for row in rows] == [[(64, 1)], [(64, 2)], [(16, 3)]]


def test_wire_bytes_of_parts_add_up_to_the_record_s():
    one = rec("all_reduce", 15, parts=(3, 5, 7))  # 22.5 bytes, rounded down
    (row,) = align([one], [])
    rows = align([one], [rec("all_reduce", size) for size in (3, 5, 7)])
    assert row.bytes["left"] == sum(row.bytes["left"] for row in rows) == one.wire_bytes == 22
    assert sum(row.bytes["left"] for row in align([one], [rec("all_reduce", 5)])) == 22


def test_a_row_says_what_became_of_its_records():
    left = [rec("reduce_scatter", 64), rec("reduce_scatter", 32)]
    whole = rec("all_reduce", 48, "forward", dtype="bfloat16", parts=(16, 32))
    (row,) = align(left, [whole], labels=("written", "derived"))
    assert row.rules == ("unfused_reduce_scatter", "combined", "dtype", "moved")
    assert row.why == ". ".join(
        [
            WHY["unfused_reduce_scatter"],
            WHY["combined"],
            f"{WHY['dtype']} (written: float32; derived: bfloat16)",
            "the same data, sent in a different phase (written: backward; derived: forward)",
        ]
    )


def test_all_types_and_phases_of_a_row_are_named():
    left = [rec("all_reduce", 8, "forward"), rec("all_reduce", 8, "backward", dtype="bfloat16")]
    names = labels("a.json", "b.json")
    assert sentence("dtype", left, left[:1], names) == WHY["dtype"] + " (a.json: bfloat16/float32; b.json: float32)"
    assert sentence("moved", left[1:], left, names).endswith("(a.json: backward; b.json: forward/backward)")
    assert sentence("edges", left, left, names) == WHY["edges"]


def test_sides_without_names_of_their_own_are_left_and_right():
    assert labels("written", "derived") == ("written", "derived")
    for pair in (("a", "a"), ("", "a"), ("a", ""), ("", "")):
        assert labels(*pair) == ("left", "right")


def test_bytes_of_a_step_are_wire_bytes_as_often_as_they_are_sent():
    loop, endless, perhaps = Executions(3, 3), Executions(2, None), Executions(0, None)
    assert step_bytes([rec("all_gather", 64)]) == 48  # 3/4 of it, on 4 ranks
    assert step_bytes([rec("all_gather", 64, executions=loop), rec("all_reduce", 8)]) == 3 * 48 + 12
    assert step_bytes([rec("all_gather", 64, executions=endless)]) == 2 * 48  # the least that is known,
    assert step_bytes([rec("all_gather", 64, executions=perhaps)]) == 48  # and at least once
    assert step_bytes([rec("all_gather", 64, executions=Executions(1, 4))]) == 4 * 48  # the most that can be
    assert step_bytes([]) == 0


records = st.builds(
    rec,
    st.sampled_from(OPS),
    st.sampled_from([0, 4, 8, 12, 64, 100]),
    st.sampled_from(PHASES),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["float32", "bfloat16", "int32"]),
    executions=st.sampled_from([Executions(1, 1), Executions(3, 3), Executions(0, 1), Executions(1, None)]),
    parts=st.sampled_from([(), (), (4, 4), (64, 36), (3, 5)]),
    computation=st.sampled_from([None, "body"]),
    detail=st.sampled_from([None, "jvp()/dot_general", "rematted_computation/psum"]),
    moves=st.sampled_from([None, None, "parameter", "gradient", "activation"]),
    groups=st.sampled_from([None, THIS, OTHER]),
    edges=st.sampled_from([None, ((0, 1), (1, 2)), ((1, 0),)]),
)


def consistent(one: Record) -> Record:
    """The parts of a record add up to it; wire bytes may be anything, as for a permute that stays where it is."""
    return replace(one, payload_bytes=sum(part.bytes for part in one.parts)) if one.parts else one


programs = st.lists(records.map(consistent), max_size=8)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(programs, programs)
def test_rows_add_up_to_the_totals_of_both_sides(left, right):
    """Every execution of every operand is in just one row: bytes, payload and calls of operands are the programs'."""
    rows = align(left, right)
    for side, program in (("left", left), ("right", right)):
        pieces = [piece for row in rows for piece in getattr(row, side)]
        assert sum(row.bytes[side] for row in rows) == step_bytes(program)
        assert sum(p.payload_bytes * p.times for p in pieces) == sum(r.payload_bytes * r.times for r in program)
        operands = [sum(r.times * max(len(r.parts), 1) for r in some) for some in (pieces, program)]
        assert operands[0] == operands[1]
        assert not any(getattr(row, side) for row in rows if row.verdict.startswith("only") and side not in row.verdict)
    assert extra_bytes(rows) == step_bytes(right) - step_bytes(left)


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
        lambda r: [rec(op, r.payload_bytes, r.phase) for op in ("reduce_scatter", "all_gather")],
    ),
    ("gather_by_sum",): ("all_gather", lambda r: [rec("all_reduce", r.payload_bytes, r.phase)]),
    ("broadcast_by_sum",): ("broadcast", lambda r: [rec("all_reduce", r.payload_bytes, r.phase)]),
    ("broadcasts_as_gather",): ("broadcast", lambda r: [rec("all_gather", r.payload_bytes, r.phase)]),
    ("split",): ("all_to_all", lambda r: [rec(r.op, r.payload_bytes * part // 4, r.phase) for part in (1, 3)]),
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(list(REWRITES)), st.sampled_from(["forward", "backward"])), max_size=9),
    st.data(),
)
def test_a_program_rewritten_record_by_record_is_told_by_just_those_rules(rewrites, data):
    """The sizes are powers of five, so that no sum of some is another; what is derived comes in any order."""
    written = [rec(REWRITES[rules][0], 64 * 5**i, phase, detail=str(i)) for i, (rules, phase) in enumerate(rewrites)]
    pieces = [
        [replace(r, name=str(i)) for r in REWRITES[rules][1](written[i])] for i, (rules, _) in enumerate(rewrites)
    ]
    derived = [r for piece in data.draw(st.permutations(pieces)) for r in piece]
    rows = align(written, derived)
    assert [row.left for row in rows] == [(one,) for one in written]
    for i, (row, (rules, _)) in enumerate(zip(rows, rewrites, strict=True)):
        assert row.rules == rules
        assert row.verdict == ("rewritten" if rules else "same")
        assert list(row.right) == pieces[i]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.sampled_from(["all_gather", "all_reduce"]), st.data())
def test_what_is_combined_by_operands_or_in_sum_is_told_as_combined(sizes, op, data):
    written = [rec(op, 4 * size) for size in sizes]
    parts = tuple(data.draw(st.permutations([4 * size for size in sizes])))
    for whole in (rec(op, sum(parts)), rec(op, sum(parts), parts=parts)):
        row = only_row(written, [whole])
        assert (row.rules, row.left, row.right) == (("combined",), tuple(written), (whole,))
        row = only_row([whole], written)
        assert (row.rules, row.left, row.right) == (("split",), (whole,), tuple(written))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs, st.randoms(use_true_random=False))
def test_a_program_is_the_same_as_itself_in_any_order(program, random):
    shuffled = [replace(r, name=str(i)) for i, r in enumerate(program)]
    random.shuffle(shuffled)
    assert {row.verdict for row in align(program, shuffled)} <= {"same"}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 50) | st.just(2**61), max_size=40), st.data())
def test_a_subset_has_the_sum_that_it_was_chosen_for(sizes, data):
    chosen = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True)) if sizes else []
    target = sum(sizes[i] for i in chosen)
    found = subset_with_sum(cumulative(sizes), target)
    assert len(set(found)) == len(found)
    assert sum(sizes[i] for i in found) == target or (len(sizes) > 24 and found == [])


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.data())
def test_a_run_of_neighbours_is_found_among_however_many(sizes, data):
    start = data.draw(st.integers(0, len(sizes) - 1))
    end = data.draw(st.integers(start + 1, len(sizes)))
    found = subset_with_sum(cumulative(sizes), sum(sizes[start:end]))
    assert sum(sizes[i] for i in found) == sum(sizes[start:end]) and found == list(range(found[0], found[-1] + 1))


def test_any_subset_is_found_among_few():
    for count, found in ((24, [0, 2]), (25, [])):
        sizes = [1000, 1, 2000] + [10] * (count - 3)
        assert subset_with_sum(cumulative(sizes), 3000) == found
    assert subset_with_sum(cumulative([1000, 1, 2000, 10]), 3000, most=3) == []


def test_thousands_of_records_are_aligned_in_seconds():
    """Also where none of them has a counterpart: 3,000 a side took 10 s once."""
    from time import perf_counter

    program = [rec("all_reduce", 4 * i, phase) for i in range(1, 1500) for phase in ("forward", "backward")]
    start = perf_counter()
    assert unexplained(align(program, program[::-1])) == 0
    other = [rec("all_reduce", 4 * i + 1, phase) for i in range(1, 1500) for phase in ("forward", "backward")]
    assert unexplained(align(program, other)) > 5000
    assert perf_counter() - start < 10
