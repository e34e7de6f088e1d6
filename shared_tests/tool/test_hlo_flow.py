"""How often the HLO reader says that a collective runs: loops, branches, calls, and all of them nested."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardiff.hlo import read
from shardiff.hlo.flow import mentioned
from shardiff.hlo.loops import count_trips
from shardiff.hlo.text import Statement
from shared_tests.tool.hlo_modules import ALL, CHOSEN, brief, module, only, valid


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


HOLDS = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__, "NE": int.__ne__, "EQ": int.__eq__}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(HOLDS)), st.integers(-9, 9), st.integers(-9, 9), st.integers(-4, 4))
def test_trips_are_those_of_running_the_loop(direction: str, start: int, bound: int, step: int) -> None:
    trips, i = 0, start
    while HOLDS[direction](i, bound) and trips < 100:
        trips, i = trips + 1, i + step
    if step:
        assert count_trips(direction, start, bound, step) == (None if trips == 100 else trips)
    elif direction not in ("EQ", "NE"):
        assert count_trips(direction, start, bound, 0) == (None if trips == 100 else 0)


# A scalar %x as compilers hand it on: instructions that make %y of it, and the computations that these call.
HANDED_ON = {
    "copy": ("%y = s32[] copy(%x)", ""),
    "convert": ("%y.0 = s64[] convert(%x)\n%y = s32[] convert(%y.0)", ""),
    "element": ("%y.0 = (f32[8], s32[]) tuple(%v, %x)\n%y = s32[] get-tuple-element(%y.0), index=1", ""),
    "fusion": (
        "%y = s32[] fusion(%v, %x), kind=kLoop, calls=%y.f",
        "%y.f (a: f32[8], b: s32[]) -> s32[] {\n%a = f32[8] parameter(0)\nROOT %b = s32[] parameter(1)\n}\n",
    ),
    "call": (
        "%y = s32[] call(%x, %v), to_apply=%y.f",
        "%y.f (a: s32[], b: f32[8]) -> s32[] {\n%a = s32[] parameter(0)\n%b = f32[8] parameter(1)\n"
        "ROOT %c = s32[] copy(%a)\n}\n",
    ),
    "element of a fusion": (
        "%y.0 = (s32[], s32[]) fusion(%x), kind=kLoop, calls=%y.f\n%y = s32[] get-tuple-element(%y.0), index=0",
        "%y.f (a: s32[]) -> (s32[], s32[]) {\n%a = s32[] parameter(0)\n%z = s32[] constant(77)\n"
        "ROOT %t = (s32[], s32[]) tuple(%a, %z)\n}\n",
    ),
    "element in a fusion": (
        "%y.0 = (f32[8], s32[]) tuple(%v, %x)\n%y = s32[] fusion(%y.0), kind=kLoop, calls=%y.f",
        "%y.f (a: (f32[8], s32[])) -> s32[] {\n%a = (f32[8], s32[]) parameter(0)\n"
        "ROOT %b = s32[] get-tuple-element(%a), index=1\n}\n",
    ),
    "and back": ("%y.c = s32[] constant(3)\n%y.0 = s32[] add(%y.c, %x)\n%y = s32[] subtract(%y.0, %y.c)", ""),
    "fused and back": (
        "%y.c = s32[] constant(-2)\n%y.0 = s32[] fusion(%x), kind=kLoop, calls=%y.f\n%y = s32[] add(%y.0, %y.c)",
        "%y.f (a: s32[]) -> s32[] {\n%a = s32[] parameter(0)\n%two = s32[] constant(2)\n"
        "ROOT %b = s32[] add(%a, %two)\n}\n",
    ),
}
# How ENTRY has a computation with the loop run, and how a condition hands on its comparison.
INSIDE = {
    "ENTRY itself": "",
    "call": "ROOT %called = {0} call({1}), to_apply=%run",
    "fusion": "ROOT %called = {0} fusion({1}), kind=kCustom, calls=%run",
    "async": "%s = ((s32[], f32[8], s32[]), {0}, u32[]) async-start({1}), calls=%run\nROOT %d = {0} async-done(%s)",
}
SEEN_THROUGH = {
    "compare": "ROOT %test = pred[] TEST",
    "copy": "%test.0 = pred[] TEST\nROOT %test = pred[] copy(%test.0)",
    "fusion": "ROOT %test = pred[] fusion(ARGUMENTS), kind=kLoop, calls=%tested",
    "call": "%test.0 = pred[] call(ARGUMENTS), to_apply=%tested\nROOT %test = pred[] copy(%test.0)",
}
SEEN_THROUGH_BY = """%tested (a: s32[], b: s32[]) -> pred[] {
      %a = s32[] parameter(0)
      %b = s32[] parameter(1)
      ROOT %test = pred[] compare(%a, %b), direction=DIRECTION
    }
"""
ways = st.lists(st.sampled_from(sorted(HANDED_ON)), max_size=2)
numbers = st.integers(-5, 5)


def handed_on(name: str, ways: list[str], v: str = "%v") -> tuple[str, str, str]:
    """(instructions, the computations that they call, the last one's name) for a scalar handed on in several ways."""
    instructions, computations = "", ""
    for number, way in enumerate(ways):
        made = f"{name}.{number}"
        lines, called = HANDED_ON[way]
        instructions += lines.replace("%v", v).replace("%x", name).replace("%y", made) + "\n"
        computations += called.replace("%y", made)
        name = made
    return instructions, computations, name


@settings(max_examples=150)
@given(
    st.sampled_from(sorted(HOLDS)), numbers, numbers, st.integers(-3, 3).filter(bool), numbers,
    st.booleans(), st.sampled_from(["constant", "state", "changed", "argument"]), st.sampled_from(sorted(INSIDE)),
    st.sampled_from(sorted(SEEN_THROUGH)), ways, ways, ways, ways, ways,
)  # fmt: skip
def test_trips_are_known_however_counter_start_and_bound_are_handed_on(
    direction, start, bound, step, offset, flipped, origin, inside, root, in_start, in_bound, in_step, in_test, in_state
) -> None:
    """while (i + offset <direction> bound) i += step, the bound a constant, in the loop's state, or not known at all.

    inside: ENTRY calls a computation that has the loop, with start and bound less 2. root: how the condition ends.
    """
    named = {
        "start": handed_on("%start", in_start, "%p"),
        "bound": handed_on("%bound", in_bound, "%p"),
        "next": handed_on("%i", in_step),
        "test": handed_on("%i", in_test),
        "state": handed_on("%n", in_state),
    }
    named["test"] = tuple(part.replace("%i.", "%j.") for part in named["test"])  # of another computation
    compared = "%k, %m" if not flipped else "%m, %k"
    shown = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction) if flipped else direction
    state = "(s32[], f32[8], s32[])"
    body_n = {"changed": "%next"}.get(origin, named["state"][2])
    of_state = f"%n = s32[] get-tuple-element(%t), index=2\n{named['state'][0]}"
    computations = f"""{named["next"][1]}{named["test"][1]}{named["state"][1]}
    %body (t: {state}) -> {state} {{
      %t = {state} parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %v = f32[8] get-tuple-element(%t), index=1
      {of_state}
      {named["next"][0]}
      %step = s32[] constant({step})
      %next = s32[] add({named["next"][2]}, %step)
      %c = f32[8] all-reduce(%v), {ALL}, to_apply=%add
      ROOT %r = {state} tuple(%next, %c, {body_n})
    }}
    %cond (t: {state}) -> pred[] {{
      %t = {state} parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %v = f32[8] get-tuple-element(%t), index=1
      {named["test"][0]}
      %off = s32[] constant({offset})
      %k = s32[] add({named["test"][2]}, %off)
      %m = s32[] {f"constant({bound})" if origin == "constant" else "get-tuple-element(%t), index=2"}
      {SEEN_THROUGH[root].replace("TEST", f"compare({compared}), direction={shown}").replace("ARGUMENTS", compared)}
    }}
    """
    of_root = SEEN_THROUGH_BY.replace("DIRECTION", shown) if root in ("fusion", "call") else ""
    loop = "%s = {0} tuple({1}, {2}, {3})\nROOT %w = {0} while(%s), condition=%cond, body=%body"
    less = 2 if INSIDE[inside] else 0
    entry = f"""%start = s32[] constant({start})
    %bound = s32[] {"parameter(1)" if origin == "argument" else f"constant({bound - less})"}
    {named["start"][0]}{named["bound"][0]}"""
    computations = named["start"][1] + named["bound"][1] + of_root + computations
    if less:
        parameters = "%a = s32[] parameter(0)\n%b = f32[8] parameter(1)\n%d = s32[] parameter(2)\n"
        parameters += "%two = s32[] constant(2)\n%e = s32[] add(%d, %two)\n"
        lines = parameters + loop.format(state, "%a", "%b", "%e")
        computations += f"%run (a: s32[], b: f32[8], d: s32[]) -> {state} {{\n{lines}\n}}\n"
        entry += INSIDE[inside].format(state, f"{named['start'][2]}, %p, {named['bound'][2]}")
    else:
        entry += loop.format(state, named["start"][2], "%p", named["bound"][2])
    trips, i = 0, start
    while HOLDS[direction](i + offset, bound) and trips < 100:
        trips, i = trips + 1, i + step
    known = trips < 100 and origin in ("constant", "state")
    for text in (computations, computations.replace("ROOT ", "")):  # without one, the last instruction is the root
        record = only(module(entry, text))
        assert brief(record)[3] == ((trips, trips) if known else (0, None))


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
