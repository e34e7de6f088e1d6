"""Ranks are merged into global records in causal order, and told by step."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shardiff.record import Executions, Part, Record, record
from shardiff.tracing.calls import Call
from shardiff.tracing.merge import collapse, merge, own_records, program_of
from shardiff.tracing.steps import step_of
from shared_tests.tool.trace_calls import PAIR, call, mark, receive, send


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


def test_rings_inside_the_stages_of_a_pipeline_are_siblings_though_one_runs_later() -> None:
    """Two microbatches: in each stage two ranks exchange, then the first stage sends to the second."""
    ranks: list[list[Call]] = []
    for rank in range(4):
        stage, place = divmod(rank, 2)
        ring: dict[str, Any] = {"group": f"cp{stage}", "ranks": (2 * stage, 2 * stage + 1), "axis": "cp"}
        line: dict[str, Any] = {"group": f"pp{place}", "ranks": (place, place + 2), "axis": "pp"}
        calls: list[Call] = []
        for _ in range(2):
            calls += receive(rank, place, len(calls), **line) if stage else []
            calls.append(send(rank, rank ^ 1, **ring))
            calls += receive(rank, rank ^ 1, len(calls), **ring)
            calls += [] if stage else [send(rank, rank + 2, **line)]
        ranks.append(calls)
    merged = collapse(replace(each, source=None) for each in merge(ranks))
    assert {(r.axis, r.edges, r.times) for r in merged} == {
        ("cp", ((0, 1), (1, 0), (2, 3), (3, 2)), 2),
        ("pp", ((0, 2), (1, 3)), 2),
    }


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
