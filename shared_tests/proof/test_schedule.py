"""Pipeline schedules are complete, in an order that can finish, and have the bubble and the peak of their formulas."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.schedule import SCHEDULES, Action, Schedule, actions, gpipe, make, parts_of, unfit
from contract.schedule_time import (
    Costs,
    Deadlock,
    bubble_fraction,
    check,
    check_rows,
    closed_form,
    closed_form_peak,
    makespan,
    peaks,
    play,
    rows,
    table,
)
from contract.slots import slots

F, B = "forward", "backward"
COSTS = (Costs(), Costs(2, 3, 1), Costs(10, 12, 8))


@st.composite
def schedules(draw) -> Schedule:
    """Any schedule that there is."""
    name, stages, chunks = draw(st.sampled_from(SCHEDULES)), draw(st.integers(1, 6)), draw(st.integers(2, 4))
    chunks = 2 if name == "zb_v" else chunks
    microbatches = draw(st.integers(1, 14))
    return make(name, stages, stages * -(-microbatches // 4) if name == "interleaved" else microbatches, chunks)


@given(schedules())
def test_every_schedule_is_complete_and_in_an_order_that_can_finish(schedule):
    check(schedule)
    check_rows(schedule, rows(schedule))
    costs = Costs(2, 3, 1)
    played = play(schedule, costs)
    for action, (start, end) in played.items():
        assert end - start == costs.of(action.kind)
        assert all(played[need][1] <= start for need in schedule.needs(action))


@given(schedules(), st.sampled_from(COSTS))
def test_the_bubble_counted_is_the_closed_form_s(schedule, costs):
    formula = closed_form(schedule.name, schedule.stages, schedule.microbatches, schedule.chunks, costs)
    if formula is not None:
        assert bubble_fraction(schedule, costs) == formula
    elif schedule.stages > 1:
        assert bubble_fraction(schedule, costs) > 0


@given(schedules())
def test_the_peak_counted_is_the_closed_form_s(schedule):
    of = (schedule.name, schedule.stages, schedule.microbatches)
    assert peaks(schedule) == [closed_form_peak(*of, stage, schedule.chunks) for stage in range(schedule.stages)]


def test_the_formulas_hold_where_they_are_said_to():
    for name in SCHEDULES:
        assert closed_form(name, 4, 8) is not None
    assert closed_form("zb_h1", 4, 3) is None and closed_form("zb_v", 4, 6) is None
    assert (
        closed_form("zb_v", 4, 8, 2, Costs(2, 3, 1)) is None and closed_form("zb_h1", 4, 8, 2, Costs(1, 1, 2)) is None
    )


def test_the_schedules_in_the_order_of_their_bubbles_and_what_they_keep():
    bubbles = [bubble_fraction(make(name, 4, 8)) for name in SCHEDULES]
    assert bubbles == [Fraction(a, b) for a, b in ((3, 4), (3, 11), (3, 11), (3, 19), (1, 9), (1, 17))]
    assert bubbles == sorted(bubbles, reverse=True)
    assert [peaks(make(name, 4, 8)) for name in SCHEDULES] == [
        [1, 1, 1, 1],
        [8, 8, 8, 8],  # m
        [4, 3, 2, 1],  # p - s
        [11, 9, 7, 5],  # of chunks of half the size: 5.5 microbatches
        [4, 4, 4, 4],  # p
        [8, 8, 8, 8],  # of chunks of half the size: p
    ]


@given(st.integers(1, 8), st.integers(1, 12))
def test_every_stage_runs_all_forward_passes_and_then_all_backward_passes_in_order(stages, microbatches):
    for stage in range(stages):
        want = [Action(kind, stage, 0, i) for kind in (F, B) for i in range(microbatches)]
        assert actions(gpipe(stages, microbatches), stage) == want


def test_the_bubble_by_hand():
    assert bubble_fraction(gpipe(4, 4)) == Fraction(3, 7)
    assert bubble_fraction(gpipe(2, 8)) == Fraction(1, 9)
    assert bubble_fraction(gpipe(1, 5)) == 0
    assert bubble_fraction(make("naive", 4, 3)) == Fraction(3, 4)
    assert makespan(make("1f1b", 2, 4)) == 5 * 3 and makespan(make("zb_h1", 2, 4)) == 4 * 3 + 1


def test_naive_has_one_stage_at_work_at_any_time():
    assert all(sum(action is not None for action in row) == 1 for row in rows(make("naive", 4, 2)))


def test_where_the_parts_live():
    assert parts_of("1f1b", 3) == ((0, 0), (1, 0), (2, 0))
    assert parts_of("interleaved", 2, 3) == ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    assert parts_of("zb_v", 3) == ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1))


def test_what_an_action_needs():
    v = make("zb_v", 2, 3)
    assert v.needs(Action(F, 1, 1, 2)) == [Action(F, 1, 0, 2)]  # the fold: from the same stage
    assert v.needs(Action("backward_input", 0, 1, 0)) == [Action(F, 0, 1, 0)]  # the last part of the model
    assert v.needs(Action("backward_weight", 0, 0, 1)) == [Action("backward_input", 0, 0, 1)]
    dealt = make("interleaved", 2, 2)
    assert dealt.needs(Action(F, 0, 1, 0)) == [Action(F, 1, 0, 0)]
    assert dealt.needs(Action(B, 1, 0, 0)) == [Action(B, 0, 1, 0), Action(F, 1, 0, 0)]


def test_the_table_shows_a_row_for_each_stage():
    assert table(gpipe(2, 3), Costs(2, 1, 1)).splitlines() == [
        "stage 0  F0 -  F1 -  F2 -  .  .  .  .  B0 -  B1 -  B2 -",
        "stage 1  .  .  F0 -  F1 -  F2 -  B0 -  B1 -  B2 -  .  .",
    ]
    assert table(make("zb_h1", 2, 2)).splitlines() == [
        "stage 0  F0 F1 .  B0 W0 B1 W1",
        "stage 1  .  F0 B0 F1 B1 W0 W1",
    ]
    assert table(make("zb_v", 1, 1)) == "stage 0  F0   F0.1 B0.1 W0.1 B0   W0"
    first, *_, last = table(gpipe(11, 1)).splitlines()
    assert first.startswith("stage 0   F0 .  .") and last.startswith("stage 10  .  .")


@pytest.mark.parametrize(("stages", "microbatches"), [(0, 1), (1, 0), (-1, 2)])
def test_a_schedule_of_nothing_is_refused_with_the_numbers(stages, microbatches):
    with pytest.raises(ValueError, match=f"got {stages} and {microbatches}"):
        gpipe(stages, microbatches)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pipedream", 2, 2), "unknown schedule 'pipedream'; known: naive, gpipe, 1f1b"),
        (("interleaved", 4, 6), "microbatches that its 4 stages divide, got 6"),
        (("interleaved", 2, 2, 1), "at least 2 chunks on every stage, got 1; 1f1b has 1"),
        (("zb_v", 2, 2, 3), "zb_v has 2 chunks on every stage, got 3"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(arguments, words):
    assert words in (unfit(*arguments) or "")
    with pytest.raises(ValueError, match=words):
        make(*arguments)


def test_orders_that_wait_for_each_other_are_found_and_named():
    schedule = make("1f1b", 2, 2)
    f0, b0, *rest = schedule.orders[1]
    swapped = replace(schedule, orders=(schedule.orders[0], (b0, f0, *rest)))
    with pytest.raises(Deadlock, match="^deadlock: B0 on stage 0 waits for B0 on stage 1; B0 on stage 1 waits for F0"):
        check(swapped)


F0, F1, B0, B1 = (Action(kind, 0, 0, microbatch) for kind in (F, B) for microbatch in (0, 1))
WRONG = {
    "twice": ((F0, F0, B0), 1, "F0 runs twice on stage 0"),
    "missing": ((F0, F1, B0), 2, "1 pass is missing, first B1 on stage 0"),
    "unknown": ((F0, B0, F1, B1), 1, "unknown pass F1 on stage 0 of 1 microbatches"),
    "of another stage": ((F0._replace(stage=1), B0), 1, "F0 of stage 1 is on stage 0"),
    "backward before its forward": ((B0, F0), 1, "B0 on stage 0 waits for F0 on stage 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_order_is_found(name):
    order, microbatches, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        check(Schedule("by hand", microbatches, ((0, 0),), (order,)))


WRONG_ROWS = {
    "forward before the stage before": (
        ((None, F0), (F0, None), (None, B0), (B0, None)),
        "F0 on stage 1 runs before F0",
    ),
    "in the same tick": (((F0, F0), (None, B0), (B0, None)), "before F0 on stage 0"),
    "backward before the stage after": (((F0, None), (B0, F0), (None, B0)), "B0 on stage 0 runs before B0 on stage 1"),
    "missing": (((F0, None), (None, F0), (None, B0)), "B0 on stage 0 is in no tick"),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_wrong_ticks_are_found(name):
    ticks, words = WRONG_ROWS[name]
    ticks = [[action and action._replace(stage=stage) for stage, action in enumerate(row)] for row in ticks]
    with pytest.raises(ValueError, match=words):
        check_rows(gpipe(2, 1), ticks)
    with pytest.raises(ValueError, match="tick 0: F0 of stage 1 is on stage 0"):
        check_rows(gpipe(2, 1), ((F0._replace(stage=1), None),))


def test_actions_print_with_kind_microbatch_and_chunk():
    kinds = (F, B, "backward_input", "backward_weight")
    assert [str(Action(kind, 3, chunk, 7)) for kind in kinds for chunk in (0, 1)] == [
        "F7", "F7.1", "B7", "B7.1", "B7", "B7.1", "W7", "W7.1",
    ]  # fmt: skip


@given(schedules())
def test_no_slot_is_taken_before_it_is_free_and_residuals_are_as_many_as_the_peak(schedule):
    told = slots(schedule)
    when = {action: tick for tick, row in enumerate(told.rows) for action in row if action is not None}
    assert told.depth["residuals"] == max(peaks(schedule))
    last = "backward_weight" if schedule.split else "backward"
    for stage in range(schedule.stages):
        kept = [(a, s) for a, s in told.of["residuals"].items() if a.stage == stage]
        for action, slot in kept:
            until = when[action._replace(kind=last)]
            others = [b for b, s in kept if s == slot and b != action]
            assert all(not when[action] <= when[b] <= until for b in others)
        waiting = {}  # slot -> the last tick in which it is read
        for action, slot in sorted(told.of["inputs"].items(), key=lambda one: when[one[0]]):
            if action.stage == stage:
                source = schedule.source(action)
                assert source is not None and waiting.get(slot, -1) <= when[source]
                waiting[slot] = when[action]
