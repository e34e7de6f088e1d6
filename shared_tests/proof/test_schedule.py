"""Pipeline schedules are complete, in a valid order, and have the bubble that the formula gives."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.schedule import Action, actions, bubble_fraction, check, gpipe, gpipe_bubble_fraction, naive, table

F, B = "forward", "backward"


@given(st.integers(1, 8), st.integers(1, 12))
def test_gpipe_is_complete_and_in_a_possible_order(stages, microbatches):
    schedule = gpipe(stages, microbatches)
    check(schedule, microbatches)
    assert len(schedule) == 2 * (microbatches + stages - 1)
    assert bubble_fraction(schedule) == gpipe_bubble_fraction(stages, microbatches)


@given(st.integers(1, 8), st.integers(1, 12))
def test_every_stage_runs_all_forward_passes_and_then_all_backward_passes_in_order(stages, microbatches):
    for stage in range(stages):
        want = [Action(kind, stage, 0, i) for kind in (F, B) for i in range(microbatches)]
        assert actions(gpipe(stages, microbatches), stage) == want


def test_the_bubble_by_hand():
    assert bubble_fraction(gpipe(4, 4)) == Fraction(3, 7)
    assert bubble_fraction(gpipe(2, 8)) == Fraction(1, 9)
    assert bubble_fraction(gpipe(1, 5)) == 0
    assert bubble_fraction(naive(4)) == Fraction(3, 4)


def test_naive_has_one_stage_at_work_at_any_time():
    assert all(sum(action is not None for action in row) == 1 for row in naive(4))
    check(naive(4), 1)


def test_the_table_shows_a_row_for_each_stage():
    assert table(gpipe(2, 3)).splitlines() == [
        "stage 0  F0 F1 F2 .  .  B0 B1 B2",
        "stage 1  .  F0 F1 F2 B0 B1 B2 .",
    ]
    first, *_, last = table(gpipe(11, 1)).splitlines()
    assert first.split() == ["stage", "0", "F0", *["."] * 20, "B0"]
    assert last.split() == ["stage", "10", *["."] * 10, "F0", "B0", *["."] * 10]
    assert first.startswith("stage 0   F0 .  .") and last.startswith("stage 10  .  .")


@pytest.mark.parametrize(("stages", "microbatches"), [(0, 1), (1, 0), (-1, 2)])
def test_a_schedule_of_nothing_is_refused_with_the_numbers(stages, microbatches):
    with pytest.raises(ValueError, match=f"got {stages} and {microbatches}"):
        gpipe(stages, microbatches)


F0, F1, B0, B1 = (Action(kind, 0, 0, microbatch) for kind in (F, B) for microbatch in (0, 1))
WRONG = {
    "forward before the stage before": (
        ((None, F0), (F0, None), (None, B0), (B0, None)),
        1,
        "F0 on stage 1 runs before F0 on stage 0",
    ),
    "forward in the same tick as the stage before": (((F0, F0), (None, B0), (B0, None)), 1, "before F0 on stage 0"),
    "backward before its forward": (((B0,), (F0,)), 1, "B0 on stage 0 runs before F0 on stage 0"),
    "backward before the stage after": (
        ((F0, None), (B0, F0), (None, B0)),
        1,
        "B0 on stage 0 runs before B0 on stage 1",
    ),
    "twice": (((F0,), (F0,), (B0,)), 1, "F0 runs twice on stage 0: in ticks 0 and 1"),
    "missing": (((F0,), (F1,), (B0,)), 2, "1 pass is missing, first B1 on stage 0"),
    "unknown": (((F0,), (B0,), (F1,), (B1,)), 1, "unknown pass B1 on stage 0 of 1 microbatches"),
    "unknown on two stages": (
        (*gpipe(2, 1), (F1, None), (None, F1)),
        1,
        "^unknown pass F1 on stage 0 of 1 microbatches$",
    ),
    "ragged": (((F0, None), (F0,)), 1, "tick 1 has 1 stages, tick 0 has 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_schedule_is_found(name):
    schedule, microbatches, words = WRONG[name]
    schedule = [[action and action._replace(stage=stage) for stage, action in enumerate(row)] for row in schedule]
    with pytest.raises(ValueError, match=words):
        check(schedule, microbatches)


def test_an_action_of_another_stage_is_found():
    with pytest.raises(ValueError, match="tick 0: F0 of stage 1 is on stage 0"):
        check(((F0._replace(stage=1),),), 1)


def test_an_action_of_a_second_chunk_says_so():
    assert [str(Action(kind, 3, chunk, 7)) for kind in (F, B) for chunk in (0, 1)] == ["F7", "F7.1", "B7", "B7.1"]
