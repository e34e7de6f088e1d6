"""How often the HLO reader says that a collective runs: loops, branches, calls, and all of them nested."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_impl.hlo.loops import count_trips
from shared_tests.hlo_modules import ALL, CHOSEN, brief, module, only, valid


def loop(
    name: str = "w",
    trips: int | None = None,
    start: str = "constant(0)",
    bound: str = "constant(5)",
    step: str = "add(%i, %one)",
    test: str = "compare(%i, %n), direction=LT",
    inside: str = f"all-reduce(%v), {ALL}, to_apply=%add",
) -> tuple[str, str]:
    """(computations, instructions of ENTRY) of a while loop around one collective."""
    config = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips is not None else ""
    computations = f"""
    %{name}.body (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
      %t = (s32[], f32[8]) parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %v = f32[8] get-tuple-element(%t), index=1
      %one = s32[] constant(1)
      %three = s32[] constant(3)
      %j = s32[] {step}
      %c = f32[8] {inside}
      ROOT %r = (s32[], f32[8]) tuple(%j, %c)
    }}
    %{name}.cond (t: (s32[], f32[8])) -> pred[] {{
      %t = (s32[], f32[8]) parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %n = s32[] {bound}
      ROOT %lt = pred[] {test}
    }}
    """
    return (
        computations,
        f"""%{name}.z = s32[] {start}
    %{name}.t = (s32[], f32[8]) tuple(%{name}.z, %p)
    %{name} = (s32[], f32[8]) while(%{name}.t), condition=%{name}.cond, body=%{name}.body{config}
    """,
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 5),
        ({"start": "constant(2)"}, 3),
        ({"start": "constant(9)"}, 0),
        ({"start": "constant(-2)"}, 7),
        ({"step": "add(%three, %i)"}, 2),
        ({"test": "compare(%i, %n), direction=LE"}, 6),
        ({"test": "compare(%i, %n), direction=NE"}, 5),
        ({"test": "compare(%n, %i), direction=GT"}, 5),
        ({"start": "constant(9)", "step": "subtract(%i, %one)", "test": "compare(%i, %n), direction=GT"}, 4),
        ({"start": "constant(9)", "step": "subtract(%i, %three)", "test": "compare(%i, %n), direction=GE"}, 2),
        ({"start": "parameter(1)"}, None),
        ({"step": "subtract(%i, %one)"}, None),
        ({"step": "multiply(%i, %three)"}, None),
        ({"step": "add(%i, %i)"}, None),
        ({"trips": 12}, 12),
        ({"trips": 0}, 0),
        ({"trips": 4, "start": "parameter(1)"}, 4),
    ],
    ids=str,
)
def test_trips_are_annotated_or_follow_from_start_step_and_bound_or_are_unknown(changes: dict, expected) -> None:
    computations, body = loop(**changes)
    assert brief(only(module(body, computations)))[3] == ((0, None) if expected is None else (expected, expected))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["LT", "LE", "GT", "GE", "NE", "EQ"]), st.integers(-9, 9), st.integers(-9, 9), st.integers(-4, 4)
)
def test_trips_are_those_of_running_the_loop(direction: str, start: int, bound: int, step: int) -> None:
    holds = {
        "LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__, "NE": int.__ne__, "EQ": int.__eq__,
    }[direction]  # fmt: skip
    trips, i = 0, start
    while holds(i, bound) and trips < 100:
        trips, i = trips + 1, i + step
    if step:
        assert count_trips(direction, start, bound, step) == (None if trips == 100 else trips)


def test_a_counter_and_its_test_inside_of_fusions_are_seen_through() -> None:
    computations, body = loop(
        step="fusion(%i, %one), kind=kLoop, calls=%plus", test="fusion(%n, %i), kind=kLoop, calls=%less"
    )
    fused = """
    %plus (a: s32[], b: s32[]) -> s32[] {
      %a = s32[] parameter(0)
      %b = s32[] parameter(1)
      %two = s32[] constant(2)
      %sum = s32[] add(%a, %two)
      ROOT %copy = s32[] copy(%sum)
    }
    %less (a: s32[], b: s32[]) -> pred[] {
      %a = s32[] parameter(0)
      %b = s32[] parameter(1)
      ROOT %lt = pred[] compare(%b, %a), direction=LT
    }
    """
    assert brief(only(module(body, fused + computations)))[3] == (3, 3)


def test_a_collective_in_a_condition_runs_once_more_than_the_body() -> None:
    computations, body = loop(trips=6)
    computations = computations.replace(
        "%n = s32[] constant(5)",
        f"%n = s32[] constant(5)\n%v = f32[8] get-tuple-element(%t), index=1\n"
        f"%x = f32[8] all-reduce(%v), {ALL}, to_apply=%add",
    )
    found = valid(module(body, computations)).collectives
    assert {record.name: brief(record)[3] for record in found} == {"c": (6, 6), "x": (7, 7)}


NESTED = """
    %in.body (t: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
      %t = (s32[], f32[8], s32[]) parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %v = f32[8] get-tuple-element(%t), index=1
      %n = s32[] get-tuple-element(%t), index=2
      %one = s32[] constant(1)
      %j = s32[] add(%i, %one)
      %c = f32[8] call(%v), to_apply=%chosen
      ROOT %r = (s32[], f32[8], s32[]) tuple(%j, %c, %n)
    }
    %in.cond (t: (s32[], f32[8], s32[])) -> pred[] {
      %t = (s32[], f32[8], s32[]) parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %n = s32[] get-tuple-element(%t), index=2
      ROOT %lt = pred[] compare(%i, %n), direction=LT
    }
    %out.body (t: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
      %t = (s32[], f32[8], s32[]) parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %v = f32[8] get-tuple-element(%t), index=1
      %n = s32[] get-tuple-element(%t), index=2
      %one = s32[] constant(1)
      %j = s32[] add(%i, %one)
      %zero = s32[] constant(0)
      %state = (s32[], f32[8], s32[]) tuple(%zero, %v, %n)
      %w = (s32[], f32[8], s32[]) while(%state), condition=%in.cond, body=%in.body
      %u = f32[8] get-tuple-element(%w), index=1
      ROOT %r = (s32[], f32[8], s32[]) tuple(%j, %u, HANDED)
    }
    %out.cond (t: (s32[], f32[8], s32[])) -> pred[] {
      %t = (s32[], f32[8], s32[]) parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %n = s32[] constant(3)
      ROOT %lt = pred[] compare(%i, %n), direction=LT
    }
"""
OUTER = """%zero = s32[] constant(0)
    %seven = s32[] constant(7)
    %state = (s32[], f32[8], s32[]) tuple(%zero, %p, %seven)
    ROOT %w = (s32[], f32[8], s32[]) while(%state), condition=%out.cond, body=%out.body"""


@pytest.mark.parametrize(
    ("handed", "chosen", "expected"),
    [
        ("%n", CHOSEN.replace("ROOT %o = f32[8] conditional(%k, %x, %x, %x), branch_computations={%no, %yes, %no}",
                              "ROOT %o = f32[8] call(%x), to_apply=%yes"), (21, 21)),
        ("%n", CHOSEN, (0, 21)),
        ("%j", CHOSEN, (0, None)),
    ],
    ids=["trips multiply", "a conditional inside", "a bound that changes"],
)  # fmt: skip
def test_nested_loops_multiply_and_a_bound_may_come_from_the_outer_loops_state(handed, chosen, expected) -> None:
    assert brief(only(module(OUTER, chosen + NESTED.replace("HANDED", handed))))[3] == expected


def test_a_computation_called_from_a_loop_and_from_outside_runs_the_sum() -> None:
    computations, body = loop(inside="call(%v), to_apply=%yes")
    text = module(body + "ROOT %once = f32[8] call(%p), to_apply=%yes", CHOSEN + computations)
    assert brief(only(text))[3] == (6, 6)


def test_comments_among_the_called_computations_do_not_hide_a_call() -> None:
    text = """%x = f32[8] call(%p), to_apply= /* } */ %yes
    %k = s32[] constant(0)
    ROOT %o = f32[8] conditional(%k, %x, %x), branch_computations={/* } */ %no, // }
      %yes}, metadata={op_name="calls=%gone body={%x"}"""
    assert brief(only(module(text, CHOSEN)))[3] == (1, 2)


def test_what_entry_does_not_reach_does_not_count() -> None:
    assert valid(module("ROOT %n = f32[8] negate(%p)", CHOSEN)).collectives == []
