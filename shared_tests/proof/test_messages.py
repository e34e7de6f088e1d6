"""What stages send when: every message once, in an order that NCCL can run; an order that cannot finish is found."""

from __future__ import annotations

import pytest
from hypothesis import given

from contract.messages import Step, check, levels, programs
from contract.schedule import Action, gpipe, make
from contract.schedule_time import Deadlock
from contract.strategies.pipeline_parallel import edge, permutes
from shared_tests.proof.test_schedule import schedules


@given(schedules())
def test_every_result_that_another_stage_needs_is_sent_and_received_once(schedule):
    made = programs(schedule)  # which also plays them
    wanted = [a for order in schedule.orders for a in order if (t := schedule.target(a)) and t.stage != a.stage]
    for op in ("send", "receive"):
        assert sorted(s.action for p in made for s in p if s.op == op and s.action) == sorted(wanted)
    for stage, program in enumerate(made):
        assert [s.action for s in program if s.op == "run"] == list(schedule.orders[stage])
        assert [s.op for s in program].count("sum") == 1


@given(schedules())
def test_both_sides_of_a_pair_post_their_transfers_in_one_order(schedule):
    def posted(stage, peer):
        for op, action in programs(schedule)[stage]:
            if op == "receive" and action.stage == peer or op == "send" and edge(schedule, action)[1] == peer:
                yield action

    for a in range(schedule.stages):
        for b in range(a):
            assert list(posted(a, b)) == list(posted(b, a))


@given(schedules())
def test_without_a_backward_pass_only_activations_are_sent(schedule):
    made = programs(schedule, forward_only=True)
    assert {s.action.kind for p in made for s in p if s.action} <= {"forward"}
    assert all(p[-1].op == "sum" for p in made)


@given(schedules())
def test_a_message_is_above_what_its_stage_has_waited_for(schedule):
    level = {action: number for number, action in levels(schedule, programs(schedule))}
    for order in schedule.orders:
        sent = [level[action] for action in order if action in level]
        assert sent == sorted(set(sent))
        for action in order:
            source = schedule.source(action)
            assert action not in level or source not in level or level[action] > level[source]


def test_gpipe_sends_in_the_ticks_of_its_table():
    for p, m in ((2, 1), (3, 2), (4, 5)):
        for phase in ("forward", "backward"):
            sent, in_ticks = (list(permutes(gpipe(p, m), phase, by_ticks).values()) for by_ticks in (False, True))
            assert sent == in_ticks and len(sent) == m + p - 2


def test_a_receive_is_posted_one_action_ahead_unless_the_channel_waits_for_a_send():
    first, last = (" ".join(f"{op} {action or ''}".strip() for op, action in p) for p in programs(make("1f1b", 2, 2)))
    assert first == "run F0 send F0 run F1 send F1 sum receive B0 receive B1 run B0 run B1"
    assert last == "receive F0 run F0 receive F1 run B0 send B0 run F1 sum run B1 send B1"


def test_transfers_posted_in_different_orders_are_a_deadlock_that_is_named():
    schedule = make("1f1b", 2, 2)
    first, last = programs(schedule)
    sends_first = tuple(step for step in last if step != Step("receive", Action("forward", 0, 0, 1)))
    at = sends_first.index(Step("send", Action("backward", 1, 0, 0)))
    crossed = (*sends_first[: at + 1], Step("receive", Action("forward", 0, 0, 1)), *sends_first[at + 1 :])
    with pytest.raises(Deadlock, match="stage 0 has posted F1 of stage 0 where stage 1 has posted B0 of stage 1"):
        check(schedule, (first, crossed))


def test_a_sum_before_another_stage_can_reach_it_is_a_deadlock():
    schedule = gpipe(2, 1)
    first, last = programs(schedule)
    early = (Step("sum", None), *(step for step in first if step.op != "sum"))
    with pytest.raises(Deadlock, match="stage 0 waits for all stages to sum the loss; F0 on stage 1 waits for F0 of"):
        check(schedule, (early, last))
