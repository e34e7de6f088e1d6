"""How often the HLO reader says that a collective runs: loops, branches, calls, and all of them nested."""

from __future__ import annotations

import pytest

from shardiff.hlo import read
from shardiff.hlo.flow import mentioned
from shardiff.hlo.text import Statement
from shared_tests.tool.hlo_modules import ALL, CHOSEN, brief, loop, module, only, valid


def test_a_collective_in_a_condition_runs_once_more_than_the_body() -> None:
    computations, body = loop(trips=6)
    computations = computations.replace(
        "%n = s32[] constant(5)",
        f"%n = s32[] constant(5)\n%v = f32[8] get-tuple-element(%t), index=1\n"
        f"%x = f32[8] all-reduce(%v), {ALL}, to_apply=%add",
    )
    found = valid(module(body, computations)).records
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


def test_a_loop_in_the_condition_of_a_loop_runs_once_more_and_its_bound_may_come_from_the_state() -> None:
    text = NESTED.replace("HANDED", "%n").replace("to_apply=%chosen", "to_apply=%yes").replace("out.body", "X.body")
    inner = text[text.index("%zero") : text.index("%u =")]
    text = text.replace(inner, "").replace("%u = f32[8] get-tuple-element(%w), index=1", "%u = f32[8] copy(%v)")
    of_state = "%n = s32[] get-tuple-element(%t), index=2\n%v = f32[8] get-tuple-element(%t), index=1\n"
    text = text.replace("%n = s32[] constant(3)", f"%three = s32[] constant(3)\n{of_state}{inner}")
    head, _, tail = text.rpartition("compare(%i, %n)")
    text = f"{head}compare(%i, %three){tail}"
    record = only(module(OUTER.replace("out.body", "X.body"), CHOSEN + text))
    assert brief(record)[3] == (28, 28)  # 7 trips in each of 4 tests


def test_a_computation_called_from_a_loop_and_from_outside_runs_the_sum() -> None:
    computations, body = loop(inside="call(%v), to_apply=%yes")
    text = module(body + "ROOT %once = f32[8] call(%p), to_apply=%yes", CHOSEN + computations)
    assert brief(only(text))[3] == (6, 6)


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_started_once_is_asynchronous_whoever_else_calls_it(order: int) -> None:
    start = "%s = ((f32[8]), f32[8], u32[]) async-start(%p), calls=%yes"
    calls = [start, "%o = f32[8] call(%p), to_apply=%yes"][::order]
    (record,) = read(module("\n".join([*calls, "%d = f32[8] async-done(%s)"]), CHOSEN)).records
    assert record.is_async and brief(record)[3] == (2, 2)


def test_names_of_called_computations_are_those_of_the_statement_and_of_no_other() -> None:
    lines = (
        "%a = f32[8] call(%p), to_apply=%before\n",
        "%b = f32[8] conditional(%k, %x, %y), true_computation=%one, false_computation=two, odd_computation=%three\n",
        "%c = f32[8] conditional(%k), branch_computations={%no, %yes}, called_computations={also}\n",
        "%w = f32[8] while(%t), condition=%more, body=%again\n",
        "%d = f32[8] call(%p), to_apply=%after\n",
        "calls=%first",
    )
    found = []
    for number, line in enumerate(lines):
        start = sum(map(len, lines[:number]))
        found.append(sorted(mentioned("".join(lines), Statement("call", "x", start, start + len(line)))))
    assert found == [
        ["before"],
        ["one", "three", "two"],
        ["also", "no", "yes"],
        ["again", "more"],
        ["after"],
        ["first"],
    ]
    assert list(mentioned("calls=%first", Statement("call", "x", 0, 12))) == ["first"]


CALLED = {
    "f32[8] call(%p), to_apply=%yes": (1, 1),
    "f32[8] fusion(%p), kind=kCustom, calls=%yes": (1, 1),
    'f32[8] custom-call(%p), custom_call_target="x", called_computations={%no, %yes}': (0, None),
    "f32[8] conditional(%k, %p, %p), branch_computations={%yes, %no}": (0, 1),
    "f32[8] conditional(%b, %p, %p), true_computation=%yes, false_computation=%no": (0, 1),
    "f32[8] conditional(%b, %p, %p), true_computation=%no, false_computation=%yes": (0, 1),
    "f32[8] conditional(%k, %p, %p), branch_computations={%yes, %yes}": (0, 2),
}


@pytest.mark.parametrize("site", CALLED)
def test_a_computation_runs_as_often_as_what_calls_it_says(site: str) -> None:
    text = f"%k = s32[] constant(0)\n%b = pred[] constant(true)\nROOT %o = {site}"
    record = only(module(text, CHOSEN))
    assert brief(record)[3] == CALLED[site] and not record.is_async
    both = f"{text.replace('ROOT ', '')}\n{text.rpartition(chr(10))[2].replace('%o', '%o2')}"
    least, most = CALLED[site]
    assert brief(only(module(both, CHOSEN)))[3] == (2 * least, None if most is None else 2 * most)


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        (2**26, 2**27, (2**53, 2**53)),
        (2**27, 2**27, (2**53, None)),
        (2**53, 1, (2**53, 2**53)),
        (2**53 + 1, 1, (0, None)),
    ],
)
def test_counts_that_no_reader_of_json_can_hold_are_unknown(outer: int, inner: int, expected: tuple) -> None:
    first, body = loop("in", trips=inner, start="copy(%zero)", inside="call(%v), to_apply=%yes")
    body = body.replace("%p", "%v").replace("%in ", "%in.w ")
    second, entry = loop("out", trips=outer, inside="copy(%u)")
    body = f"%zero = s32[] constant(0)\n{body}\n%u = f32[8] get-tuple-element(%in.w), index=1\n%c = f32[8] copy"
    second = second.replace("%c = f32[8] copy", body, 1)
    assert brief(only(module(entry, CHOSEN + first + second)))[3] == expected


def test_comments_among_the_called_computations_do_not_hide_a_call() -> None:
    text = """%x = f32[8] call(%p), to_apply= /* } */ %yes
    %k = s32[] constant(0)
    ROOT %o = f32[8] conditional(%k, %x, %x), branch_computations={/* } */ %no, // }
      %yes}, metadata={op_name="calls=%gone body={%x"}"""
    assert brief(only(module(text, CHOSEN)))[3] == (1, 2)


def test_what_entry_does_not_reach_does_not_count() -> None:
    assert valid(module("ROOT %n = f32[8] negate(%p)", CHOSEN)).records == []
