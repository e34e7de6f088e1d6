"""How many trips of a loop the HLO reader finds, and where it says that the number is unknown."""

from __future__ import annotations

import pytest

from shardiff.hlo import read
from shared_tests.tool.hlo_modules import ALL, brief, loop, module, only


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
        ({"step": "subtract(%three, %i)"}, None),
        ({"trips": 12}, 12),
        ({"trips": 0}, 0),
        ({"trips": 4, "start": "parameter(1)"}, 4),
    ],
    ids=str,
)
def test_trips_are_annotated_or_follow_from_start_step_and_bound_or_are_unknown(changes: dict, expected) -> None:
    computations, body = loop(**changes)
    assert brief(only(module(body, computations)))[3] == ((0, None) if expected is None else (expected, expected))


@pytest.mark.parametrize(
    "bound",
    ["constant(true)", "constant({1})", "multiply(%i, %i)", "get-tuple-element(%t), index=9"]
    + ["get-tuple-element(%t), index=2", "get-tuple-element(%t)", "parameter(x)"],
)
@pytest.mark.parametrize("compared", ["%i, %n", "%n, %i"])
def test_what_is_no_known_number_makes_no_known_trips(bound: str, compared: str) -> None:
    computations, body = loop(bound=bound, test=f"compare({compared}), direction=LT")
    assert [brief(record)[3] for record in read(module(body, computations)).records] == [(0, None)]


def test_a_comparison_of_another_kind_makes_no_known_trips() -> None:
    for test in ("compare(%i, %n)", "compare(%i, %n), direction=XX", "and(%i, %n)", "compare(%i)", "copy()"):
        computations, body = loop(test=test)
        assert [brief(record)[3] for record in read(module(body, computations)).records] == [(0, None)]


def test_an_operand_that_is_missing_makes_no_known_trips() -> None:
    """No program, but perhaps a damaged one: an answer, not an error."""
    computations, body = loop(step="fusion(%one), kind=kLoop, calls=%plus")
    plus = "%plus (a: s32[], b: s32[]) -> s32[] {\n%a = s32[] parameter(0)\nROOT %b = s32[] parameter(1)\n}\n"
    assert [brief(record)[3] for record in read(module(body, plus + computations)).records] == [(0, None)]
    for step in (
        "fusion(%i), kind=kLoop",
        "call(%i)",
        "call(%i), to_apply={}",
        "add(%i)",
        "copy()",
        "add(%one, %gone)",
    ):
        computations, body = loop(step=step)
        assert [brief(record)[3] for record in read(module(body, computations)).records] == [(0, None)]
    computations, body = loop(start="copy(%z)")
    run = f"%run (z: s32[], p: f32[8]) -> s32[] {{\n%p = f32[8] parameter(0)\n%z = s32[] parameter(1)\n{body}}}\n"
    text = module("%r = s32[] call(%p), to_apply=%run", computations + run)
    assert [brief(record)[3] for record in read(text).records] == [(0, None)]


def executions(computations: str, body: str) -> list[tuple]:
    """Of the collectives of a module that need not be valid."""
    return [brief(record)[3] for record in read(module(body, computations)).records]


def test_a_loop_that_lacks_a_part_makes_no_known_trips() -> None:
    computations, body = loop()
    for old, new in ((", condition=%w.cond", ""), ("while(%w.t)", "while()")):
        assert old in body and executions(computations, body.replace(old, new)) == [(0, None)]
    computations = computations.replace("%n = ", f"%x = f32[8] all-reduce(%i), {ALL}, to_apply=%add\n%n = ")
    assert executions(computations, body.replace(", body=%w.body", "")) == [(1, None)]


def test_a_counter_that_is_set_from_elsewhere_makes_no_known_trips() -> None:
    """Another element of the state, an element of an element, one that is not named."""
    other = "add(%m, %one)\n%m = s32[] get-tuple-element(%t), index=2"
    assert executions(*loop(step=other)) == [(0, None)]
    inner = "constant(5)\n%k = s32[] get-tuple-element(%k.0), index=1\n%k.0 = (s32[], s32[]) get-tuple-element(%t)"
    for index in (", index=0", ""):
        assert executions(*loop(bound=inner + index, test="compare(%k, %n), direction=LT")) == [(0, None)]


@pytest.mark.parametrize(
    ("root", "tested", "stepped"),
    [
        ("constant(5)", (5, 5), (0, None)),
        ("constant(true)", (0, None), (0, None)),
        ("parameter(1)", (5, 5), (0, None)),
        ("parameter(2)", (0, None), (0, None)),
        ("multiply(%a, %a)", (0, None), (0, None)),
        ("add(%a, %one)", (0, None), (5, 5)),
    ],
)
def test_what_a_fusion_computes_is_known_if_it_is_a_number_or_handed_through(root, tested, stepped) -> None:
    lines = f"%a = s32[] parameter(0)\n%one = s32[] constant(1)\n%k = s32[] {root}\n"
    less = f"%less (a: s32[]) -> pred[] {{\n{lines}ROOT %lt = pred[] compare(%a, %k), direction=LT\n}}\n"
    computations, body = loop(test="fusion(%i, %n), kind=kLoop, calls=%less")
    assert executions(less + computations, body) == [tested]
    following = f"%following (a: s32[]) -> s32[] {{\n{lines}ROOT %b = s32[] copy(%k)\n}}\n"
    computations, body = loop(step="fusion(%i, %v), kind=kLoop, calls=%following")
    assert executions(following + computations, body) == [stepped]


@pytest.mark.parametrize(("length", "expected"), [(80, (5, 5)), (300, (0, None))])
def test_long_chains_of_copies_are_followed_for_a_while(length: int, expected: tuple) -> None:
    copies = "\n".join(f"%i.{k + 1} = s32[] copy(%i.{k})" for k in range(length))
    computations, body = loop(step=f"add(%i.{length}, %one)")
    computations = computations.replace("%v = f32[8]", f"%i.0 = s32[] copy(%i)\n{copies}\n%v = f32[8]", 1)
    assert brief(only(module(body, computations)))[3] == expected


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
