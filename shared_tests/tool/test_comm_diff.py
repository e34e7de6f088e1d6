"""The alignment of records: what is matched first. test_diff_properties.py has what holds for all programs."""

from __future__ import annotations

import pytest

from shardiff.diff.rows import SAME, Row, align, unexplained
from shardiff.diff.rules import WHY, labels, sentence
from shardiff.record import Executions, step_bytes
from shared_tests.tool.diff_records import OTHER, THIS, only_row, permute, rec


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
    assert left.why.endswith("no rule explains; the nearest in right has 4 bytes more")
    assert right.why.endswith("no rule explains; the nearest in left has 4 bytes fewer")
    left, _ = align([rec("all_reduce", 64)], [rec("all_reduce", 64, dtype="int32")], labels=("written", "derived"))
    assert left.why.endswith("; the nearest in derived has the same number of bytes, but is of int32")
    left, right = align([rec("broadcast", 64, root=0)], [rec("broadcast", 64, "forward", root=1)])
    other = "the same number of bytes, but is broadcast(root 1) and is in the phase forward"
    assert left.why == f"broadcast of 64 bytes, which no rule explains; the nearest in right has {other}"
    assert right.why.startswith("broadcast(root 1) of 64 bytes, which no rule explains; ")


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
