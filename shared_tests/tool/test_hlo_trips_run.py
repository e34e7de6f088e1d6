"""The trips that the HLO reader finds are those of running the loop, however its numbers are handed on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardiff.hlo.loops import count_trips
from shared_tests.tool.hlo_modules import ALL, brief, module, only

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
    lines, called, last = (part.replace("%i.", "%j.") for part in named["test"])  # of another computation
    named["test"] = lines, called, last
    compared = "%k, %m" if not flipped else "%m, %k"
    mirrored = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}
    shown = str(mirrored.get(direction, direction) if flipped else direction)
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
