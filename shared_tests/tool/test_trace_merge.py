"""Ranks are merged into global records in causal order, and where they disagree the merge says who does what."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shardiff.record import Executions, Part, Record, record
from shardiff.tracing.calls import Call
from shardiff.tracing.merge import MismatchError, collapse, merge, own_records, program_of
from shardiff.tracing.silent import differences, suspicions, unbatched
from shardiff.tracing.steps import step_of

PAIR = (0, 1)


def call(rank: int, op: str, **fields: Any) -> Call:
    """A call of 4 float32 in a group of all ranks that the test has."""
    defaults: dict[str, Any] = {"dtype": "float32", "payload_bytes": 16, "shapes": ((4,),), "group": "0", "ranks": PAIR}
    if op in ("barrier", "wait"):
        defaults = {"group": "0", "ranks": PAIR} if op == "barrier" else {}
    return Call(rank, op, **defaults | {"source": f"{'ab'[rank % 2]}.py:{rank}"} | fields)


def send(rank: int, peer: int, **fields: Any) -> Call:
    return call(rank, "send", **{"ranks": (0, 1, 2, 3), "peer": peer, "is_async": True} | fields)


def receive(rank: int, peer: int | None, at: int, **fields: Any) -> list[Call]:
    """A receive, which is this rank's call number `at`, and its wait."""
    posted = call(rank, "recv", **{"ranks": (0, 1, 2, 3), "peer": peer, "is_async": True} | fields)
    return [posted, call(rank, "wait", of=at)]


def disagreements(*ranks: list[Call]) -> list[str]:
    with pytest.raises(MismatchError) as caught:
        merge(ranks)
    return caught.value.disagreements


def test_a_call_survives_json() -> None:
    parts = (Part("float32", 8), Part("float32", 8))
    given = call(0, "all_to_all", to=(4, 12), by=(8, 8), flags=("sparse",), parts=parts, phase="backward")
    assert Call.from_json(json.loads(json.dumps(given.to_json()))) == given


def test_a_call_of_every_rank_is_one_record() -> None:
    [merged] = merge([[call(rank, "all_reduce", is_async=rank == 1)] for rank in PAIR])
    assert merged == record(
        "all_reduce", "float32", 16, 2, groups=(PAIR,), phase="forward", is_async=True, source="a.py:0", shape=(4,)
    )


def test_sibling_groups_of_a_mesh_are_one_record() -> None:
    groups = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    ranks = [
        [call(r, "all_reduce", group=f"g{g[0]}", ranks=g, axis="tp", source="a.py:1") for _ in range(2)]
        for r, g in groups.items()
    ]
    merged = merge(ranks)
    assert [r.groups for r in merged] == [((0, 1), (2, 3))] * 2
    assert [r.executions for r in collapse(merged)] == [Executions(2, 2)]


def test_stages_that_reduce_their_own_gradients_over_one_axis_are_one_record_that_names_them_all() -> None:
    def stage(ranks: tuple[int, int], names: str) -> dict[int, list[Call]]:
        fields: dict[str, Any] = {"group": str(ranks), "ranks": ranks, "axis": "dp", "source": "train.py:1"}
        return {r: [call(r, "all_reduce", detail=f"gradient of {name}", **fields) for name in names] for r in ranks}

    by_rank = stage((0, 2), "ab") | stage((1, 3), "cd")
    merged = merge([by_rank[rank] for rank in range(4)])
    assert [(r.groups, r.detail) for r in merged] == [
        (((0, 2), (1, 3)), "gradient of a; gradient of c"),
        (((0, 2), (1, 3)), "gradient of b; gradient of d"),
    ]
    assert sum(r.payload_bytes for r in merged) == 32, "what one rank moves"


def test_groups_that_share_a_rank_are_not() -> None:
    ranks: list[list[Call]] = [[], [], []]
    for group in ((0, 1), (0, 2)):
        for rank in group:
            ranks[rank].append(call(rank, "all_reduce", group=str(group), ranks=group, source="a.py:1"))
    assert [r.groups for r in merge(ranks)] == [((0, 1),), ((0, 2),)]


def test_a_shift_is_one_permute() -> None:
    ranks = [[send(r, (r + 1) % 4), *receive(r, (r - 1) % 4, 1)] for r in range(4)]
    [merged] = merge(ranks)
    assert merged.edges == ((0, 1), (1, 2), (2, 3), (3, 0))
    assert (merged.op, merged.payload_bytes, merged.group_size) == ("collective_permute", 16, None)


def test_a_chain_is_one_permute_after_the_other() -> None:
    ranks = [[send(0, 1)], [*receive(1, 0, 0), send(1, 2)], receive(2, 1, 0), []]
    assert [r.edges for r in merge(ranks)] == [((0, 1),), ((1, 2),)]


def test_a_receive_counts_where_it_is_waited_for() -> None:
    posted, waited = receive(1, 0, 0)
    ranks = [[send(0, 1)], [posted, send(1, 2), waited], receive(2, 1, 0), []]
    assert [r.edges for r in merge(ranks)] == [((0, 1), (1, 2))]


def test_a_permute_has_the_payload_of_its_largest_edge() -> None:
    ranks = [[send(0, 1, payload_bytes=8)], receive(1, 0, 0, payload_bytes=8), [send(2, 3)], receive(3, 2, 0)]
    assert [(r.edges, r.payload_bytes) for r in merge(ranks)] == [(((0, 1), (2, 3)), 16)]


def test_a_permute_gives_each_rank_one_message() -> None:
    ranks = [[send(0, 2)], [send(1, 2)], [*receive(2, 0, 0), *receive(2, 1, 2)], []]
    assert [r.edges for r in merge(ranks)] == [((0, 2),), ((1, 2),)]


def test_a_barrier_orders_messages_and_is_no_record() -> None:
    def barrier(rank: int) -> Call:
        return call(rank, "barrier", ranks=(0, 1, 2, 3))

    ranks = [[send(0, 1), barrier(0)], [*receive(1, 0, 0), barrier(1)], [barrier(2), send(2, 3)], [barrier(3)]]
    ranks[3] += receive(3, 2, 1)
    assert [r.edges for r in merge(ranks)] == [((0, 1),), ((2, 3),)]


def test_a_receive_from_anyone_learns_its_source_when_it_is_waited_for() -> None:
    posted, waited = receive(2, None, 0)
    ranks = [[send(0, 2)], [], [posted, replace(waited, peer=0)], []]
    assert [r.edges for r in merge(ranks)] == [((0, 2),)]
    assert [r.edges for r in merge([ranks[0], [], [posted], []])] == [((0, 2),)], "or takes what is left"


def test_the_phase_of_a_message_is_the_senders() -> None:
    ranks = [[send(0, 1, phase="backward")], receive(1, 0, 0, phase="forward")]
    assert [r.phase for r in merge(ranks)] == ["backward"]


def test_it_takes_linear_time() -> None:
    steps = 20_000
    ranks = [[call(rank, "all_reduce") for _ in range(steps)] for rank in PAIR]
    assert [r.executions.max for r in collapse(merge(ranks))] == [steps]


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


def test_one_rank_alone_sees_what_it_sends_and_receives() -> None:
    seen = own_records([call(1, "all_reduce"), send(1, 0), *receive(1, 0, 2)])
    assert [(r.op, r.edges, r.wire_bytes, r.flags) for r in seen] == [
        ("all_reduce", None, 16, ()),
        ("collective_permute", ((1, 0),), 16, ()),
        ("collective_permute", ((0, 1),), 0, ("received",)),
    ]


def test_equal_records_collapse_in_the_order_of_the_first() -> None:
    a = record("all_reduce", "float32", 16, 2)
    b = record("all_gather", "float32", 16, 2)
    collapsed: list[Record] = collapse([a, b, a, a])
    assert [(r.op, r.executions) for r in collapsed] == [("all_reduce", Executions(3, 3)), ("all_gather", Executions())]


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


def mark(rank: int, text: str, of: int | None = None) -> Call:
    return Call(rank, "mark", detail=text, of=of)


def step_calls(rank: int, *marks: str) -> list[Call]:
    """A mark for each text; a call in place of "call", and of "update" one of an optimizer."""
    return [
        call(rank, "all_reduce", phase="update" if text == "update" else "other")
        if text in ("call", "update")
        else mark(rank, text)
        for text in marks
    ]


@pytest.mark.parametrize(
    ("marks", "steps"),
    [
        ("call begin call call optimizer", [0, 1, 1]),
        ("call begin call optimizer update call begin call optimizer call", [0, 1, 1, 2, 2, -1]),
        ("begin call step call step call", [1, 2, -1]),
        ("begin call optimizer begin call optimizer step call", [1, 1, -1]),
        ("call begin call", [0, -1]),
        ("call call", [0, 0]),
    ],
)
def test_a_run_is_told_by_step(marks: str, steps: list[int]) -> None:
    calls = step_calls(0, *marks.split())
    assert [step for step, each in zip(step_of(calls), calls, strict=True) if each.op != "mark"] == steps
    program = program_of([step_calls(rank, *marks.split()) for rank in PAIR])
    names = {0: "set-up", -1: "rest"}
    assert {n: sum(p.counts().values()) for n, p in program.segments.items()} == {
        names.get(step, f"step {step}"): steps.count(step) for step in steps
    }
    assert program.counts() == {"all_reduce": len(steps)}, "the segments add up to the whole"


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
