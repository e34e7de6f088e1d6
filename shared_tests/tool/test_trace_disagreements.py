"""Where ranks disagree, the merge says which rank does what; what only looks suspicious is pointed out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shardiff.tracing.calls import Call
from shardiff.tracing.merge import MismatchError, collapse, merge
from shardiff.tracing.silent import differences, suspicions, unbatched
from shared_tests.tool.trace_calls import PAIR, call, disagreements, mark, receive, send


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"op": "all_gather"}, "all_gather float32 16 B [4]"),
        ({"payload_bytes": 32, "shapes": ((8,),)}, "all_reduce float32 32 B [8]"),
        ({"dtype": "int32"}, "all_reduce int32 16 B [4]"),
        ({"shapes": ((2, 2),)}, "all_reduce float32 16 B [2, 2]"),
    ],
)
def test_another_op_size_dtype_or_shape_is_named_by_rank(change: dict[str, Any], says: str) -> None:
    first = [call(rank, "broadcast", peer=0) for rank in PAIR]
    other = replace(call(1, "all_reduce"), **change)
    [line] = disagreements([first[0], call(0, "all_reduce")], [first[1], other])
    ours = "group 0 (ranks 0, 1), call 2: rank 0: all_reduce float32 16 B [4] at a.py:0"
    assert line == f"{ours}; rank 1: {says} at b.py:1"


def test_another_root_is_named() -> None:
    [line] = disagreements([call(0, "broadcast", peer=0)], [call(1, "broadcast", peer=1)])
    assert (
        "rank 0: broadcast float32 16 B [4] root rank 0" in line
        and "rank 1" in line
        and "root rank 1 at b.py:1" in line
    )


def test_another_order_is_one_disagreement_not_two() -> None:
    a = [call(0, "all_reduce"), call(0, "all_gather")]
    [line] = disagreements(a, [replace(c, rank=1) for c in reversed(a)])
    assert "call 1: rank 0: all_reduce" in line and "rank 1: all_gather" in line


def test_a_missing_call_is_named_with_the_last_that_was_made() -> None:
    ranks = [[call(rank, "all_reduce", ranks=(0, 1, 2)) for _ in range(2 - (rank == 2))] for rank in range(3)]
    with pytest.raises(MismatchError, match="the ranks disagree") as caught:
        merge(ranks)
    [line] = caught.value.disagreements
    assert "call 2: " in line
    assert line.endswith("rank 2: no such call (its last: all_reduce float32 16 B [4] at a.py:2)")
    assert [r.op for r in caught.value.records] == ["all_reduce"], "what they agree on"


def test_a_rank_without_any_call() -> None:
    [line] = disagreements([call(0, "all_reduce")], [])
    assert line.endswith("rank 1: no such call (its last: none)")


def test_uneven_blocks_must_fit() -> None:
    a, b = call(0, "all_to_all", to=(4, 12), by=(4, 8)), call(1, "all_to_all", to=(8, 8), by=(12, 8))
    assert [r.payload_bytes for r in merge([[a], [b]])] == [16]
    [line] = disagreements([a], [replace(b, by=(8, 12))])
    assert "rank 0" in line and "bytes to each rank [4, 12]" in line and "from each [8, 12]" in line


SENT = "send float32 16 B [4] to rank 1 at a.py:0"
RECEIVED = "recv float32 16 B [4] from rank 0 at b.py:1"


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([[send(0, 1)], []], f"message 1 from rank 0 to rank 1: rank 0: {SENT}; rank 1: no such receive"),
        ([[], receive(1, 0, 0)], f"message 1 from rank 0 to rank 1: rank 0: no such send; rank 1: {RECEIVED}"),
        ([[send(0, 1)], receive(1, 0, 0, payload_bytes=8)], "rank 1: recv float32 8 B"),
        ([[send(0, 1, tag=1)], receive(1, 0, 0)], "tag 1"),
        ([[], receive(1, None, 0)], "message 1 from any rank to rank 1"),
    ],
)
def test_messages_without_a_counterpart_are_named(ranks: list[list[Call]], says: str) -> None:
    assert any(says in line for line in disagreements(*ranks))


def test_another_reduction_is_a_disagreement_and_else_another_record() -> None:
    [line] = disagreements(*([call(rank, "all_reduce", reduction=("sum", "max")[rank])] for rank in PAIR))
    assert "rank 0: all_reduce(sum) float32" in line and "rank 1: all_reduce(max) float32 16 B [4] at b.py:1" in line
    ranks = [[call(rank, "all_reduce", reduction=kind, source="a.py:1") for kind in ("sum", "max")] for rank in PAIR]
    assert [r.reduction for r in collapse(merge(ranks))] == ["sum", "max"]


def test_even_blocks_of_one_rank_fit_uneven_ones_of_another() -> None:
    a, b = call(0, "all_to_all", to=(4, 4), by=(4, 12), payload_bytes=8), call(1, "all_to_all", to=(12, 4), by=(4, 4))
    assert [r.op for r in merge([[a], [b]])] == ["all_to_all"]
    [line] = disagreements([replace(a, to=(), by=())], [b])
    assert "rank 0: all_to_all float32 8 B [4] at a.py:0, bytes to each rank [4, 4], from each [4, 4]" in line


def test_ranks_that_meet_with_different_parameters_or_from_different_lines_are_told_once() -> None:
    swapped = [[call(r, "all_reduce", detail=f"gradient of {name}", source="a.py:1") for name in names]
               for r, names in enumerate(("abab", "baba"))]  # fmt: skip
    lines = suspicions(swapped)
    assert len(lines) == 2 and lines[0] == (
        "group 0 (ranks 0, 1), call 1: rank 0: all_reduce float32 16 B [4] (gradient of a) at a.py:1; "
        "rank 1: all_reduce float32 16 B [4] (gradient of b) at a.py:1 (2 times)"
    )
    assert "call 2: rank 0" in lines[1]
    assert not suspicions([[replace(each, detail="x") for each in calls] for calls in swapped])
    [line] = suspicions([[call(0, "all_reduce")], [call(1, "all_reduce")]])
    assert "at a.py:0" in line and "at b.py:1" in line
    assert not suspicions([[call(r, "broadcast", peer=0)] for r in PAIR]), "a root has a line of its own"


def test_replicas_that_differ_are_told_by_the_first() -> None:
    def valued(rank: int, *hashes: str) -> list[Call]:
        return [each for i, text in enumerate(hashes) for each in
                (call(rank, "all_reduce", detail=f"p{i}"), mark(rank, f"value {text}", 2 * i))]  # fmt: skip

    assert not differences([valued(0, "aa", "bb"), valued(1, "aa", "bb")])
    [line] = differences([valued(0, "aa", "bb", "cc"), valued(1, "aa", "b2", "c2")])
    assert "(p1)" in line and "has bb" in line and "has b2" in line and "(1 later results differ too)" in line

    def replica(rank: int, weight: str) -> Call:
        about = {"when": "after step 3", "ranks": [0, 1], "hashes": {"bias": "00", "weight": weight}}
        return mark(rank, f"parameter {json.dumps(about)}")

    assert not differences([[replica(0, "11")], [replica(1, "11")]])
    assert differences([[replica(0, "11")], [replica(1, "22")]]) == [
        "the parameter weight differs between replicas after step 3: rank 0: 11; rank 1: 22"
    ]


def test_unbatched_messages_among_more_than_two_ranks_are_pointed_out() -> None:
    three: dict[str, Any] = {"ranks": (0, 1, 2), "is_async": False}
    ring = [[send(r, (r + 1) % 3, **three), call(r, "recv", peer=(r - 1) % 3, **three)] for r in range(3)]
    [line] = unbatched(ring)
    assert line.startswith("ranks 0 to 2 exchange unbatched messages (a.py:0, b.py:1, a.py:2)")
    assert not unbatched([[replace(each, batched=True) for each in calls] for calls in ring])
    assert not unbatched([[send(0, 1, **three)], [call(1, "recv", peer=0, **three)], []]), "a pair has one order"
