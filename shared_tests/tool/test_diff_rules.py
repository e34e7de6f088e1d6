"""Every rule of the diff explains a small example. test_diff_lookalikes.py has what only looks like an example."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardiff.diff.rules import WHY
from shardiff.record import Executions, Part, Record, step_bytes
from shared_tests.tool.diff_records import BOTH, DP, TP, derived, looped, only_row, over, permute, rec

EXPLAINED = {
    "unfused reduce_scatter": (
        {"unfused_reduce_scatter"},
        [rec("reduce_scatter", 64)],
        [rec("all_reduce", 64)],
    ),
    "fused reduce_scatter": ({"fused_reduce_scatter"}, [rec("all_reduce", 64)], [rec("reduce_scatter", 64)]),
    "decomposed all_reduce": (
        {"decomposed_all_reduce"},
        [rec("all_reduce", 64)],
        [rec("reduce_scatter", 64), rec("all_gather", 64)],
    ),
    "an all_reduce decomposed by its parts": (
        {"decomposed_all_reduce"},
        [rec("all_reduce", 96)],
        [rec("reduce_scatter", 96, parts=(64, 32)), rec("all_gather", 96, parts=(32, 64))],
    ),
    "recomposed all_reduce": (
        {"recomposed_all_reduce"},
        [rec("reduce_scatter", 64), rec("all_gather", 64)],
        [rec("all_reduce", 64)],
    ),
    "gather by sum": ({"gather_by_sum"}, [rec("all_gather", 64)], [rec("all_reduce", 64)]),
    "broadcast by sum": ({"broadcast_by_sum"}, [rec("broadcast", 64)], [rec("all_reduce", 64)]),
    "broadcasts as one gather": (
        {"broadcasts_as_gather", "combined"},
        [rec("broadcast", 64, "update", root=0), rec("broadcast", 32, "update", root=1)],
        [rec("all_gather", 96, "update")],
    ),
    "combined": ({"combined"}, [rec("all_reduce", 64), rec("all_reduce", 32)], [rec("all_reduce", 96)]),
    "combined by parts": (
        {"combined"},
        [rec("all_reduce", 64), rec("all_reduce", 4)],
        [rec("all_reduce", 68, parts=(4, 64))],
    ),
    "calls of one line are no loop": (
        {"combined"},
        [rec("all_reduce", 64, executions=Executions(3, 3))],
        [rec("all_reduce", 192, parts=(64, 64, 64))],
    ),
    "parts of two types": (
        {"combined", "dtype"},
        [rec("all_gather", 32, dtype="bfloat16")] * 3,
        [rec("all_gather", 160, dtype="bfloat16+float32", parts=())],
    ),
    "combined and of another type": (
        {"combined", "dtype"},
        [rec("all_reduce", 64), rec("all_reduce", 32)],
        [rec("all_reduce", 48, dtype="bfloat16")],
    ),
    "combined over phases": (
        {"combined", "moved"},
        [rec("all_reduce", 64, "forward"), rec("all_reduce", 32)],
        [rec("all_reduce", 96)],
    ),
    "four sums with parts, and the loss with them": (
        {"unfused_reduce_scatter", "combined", "moved"},
        [*[rec("reduce_scatter", 80)] * 2, rec("all_reduce", 4, "forward")],
        [rec("all_reduce", 164, parts=(64, 16, 64, 16, 4))],
    ),
    "split": ({"split"}, [rec("all_gather", 96)], [rec("all_gather", 64), rec("all_gather", 32)]),
    "regrouped": (
        {"regrouped"},
        [rec("all_reduce", s) for s in (64, 32, 4)],
        [rec("all_reduce", s) for s in (48, 52)],
    ),
    "regrouped in a loop": (
        {"regrouped", "loop"},
        [looped(rec("all_reduce", 48), 2)],
        [rec("all_reduce", 64), rec("all_reduce", 32)],
    ),
    "regrouped and of another type": (
        {"regrouped", "dtype"},
        [rec("all_reduce", 64), rec("all_reduce", 32)],
        [rec("all_reduce", 40, dtype="bfloat16"), rec("all_reduce", 8, dtype="bfloat16")],
    ),
    "loop": ({"loop"}, [rec("all_gather", 64)] * 3, [looped(rec("all_gather", 64), 3)]),
    "loop of a permute": (
        {"loop"},
        [permute(8, [(0, 1)]), permute(8, [(1, 2)])],
        [permute(8, [(0, 1), (1, 2)], times=2)],
    ),
    "dtype": ({"dtype"}, [rec("all_gather", 64)], [rec("all_gather", 32, dtype="bfloat16")]),
    "integers of another width": (
        {"dtype"},
        [rec("all_gather", 64, dtype="int64")],
        [rec("all_gather", 32, dtype="uint32")],
    ),
    "packed integers": ({"dtype"}, [rec("all_gather", 64, dtype="int8")], [rec("all_gather", 32, dtype="uint4")]),
    "averaged": (
        {"averaged"},
        [rec("all_reduce", 64, reduction="avg")],
        [rec("all_reduce", 64, reduction="sum")],
    ),
    "moved": ({"moved"}, [rec("all_reduce", 4, "forward")], [rec("all_reduce", 4, "backward")]),
    "edges": ({"edges"}, [permute(8, [(0, 1)])], [permute(8, [(0, 1), (1, 0)])]),
    "gathered again": (
        {"gathered_again"},
        [rec("all_gather", 64, "forward")],
        [rec("all_gather", 64, "forward"), rec("all_gather", 64, "backward")],
    ),
    "gathered again in another type": (
        {"gathered_again", "dtype"},
        [rec("all_gather", 64, "forward")],
        [rec("all_gather", 64, "forward"), rec("all_gather", 32, "backward", dtype="bfloat16")],
    ),
    "kept": (
        {"kept"},
        [rec("all_gather", 64, "forward"), rec("all_gather", 64, "backward")],
        [rec("all_gather", 64, "forward")],
    ),
    "kept and combined": (
        {"kept", "combined"},
        [rec("all_gather", s, phase) for phase in ("forward", "backward") for s in (80, 96)],
        [rec("all_gather", 176, "forward", parts=(64, 16, 64, 32))],
    ),
    "recomputed by its name": (
        {"recomputed"},
        [rec("all_reduce", 64, "forward")],
        [rec("all_reduce", 64, "forward"), derived(rec("all_reduce", 64), "remat/rematted_computation/dot_general")],
    ),
    "recomputed by its line": (
        {"recomputed"},
        [rec("all_to_all", 64, "forward")],
        [rec("all_to_all", 64, phase, source="model.py:7") for phase in ("forward", "backward")],
    ),
    "not recomputed": (
        {"kept"},
        [rec("all_to_all", 64, phase, source="model.py:7") for phase in ("forward", "backward")],
        [rec("all_to_all", 64, "forward")],
    ),
    "the gradients of q, k and v one by one": (
        {"reduced_one_by_one"},
        [rec("all_reduce", 64)],
        [derived(rec("all_reduce", 192, parts=(64, 64, 64)))],
    ),
    "the gradients of q, k and v added first": (
        {"added_first"},
        [rec("all_reduce", 64)] * 3,
        [derived(rec("all_reduce", 64))],
    ),
    "calls that a trace cannot tell apart, added first": (
        {"added_first"},
        [replace(rec("all_reduce", 64), executions=Executions(3, 3))],
        [derived(rec("all_reduce", 64))],
    ),
    "the loss of the whole batch": (
        {"global_value"},
        [rec("all_reduce", 64)],
        [derived(rec("all_reduce", 68, parts=(64, 4)))],
    ),
    "bubble ticks": ({"loop", "bubble_ticks"}, [permute(8, [(0, 1)])] * 2, [permute(8, [(0, 1)], times=3)]),
    "one sum over two axes": (
        {"joined_axes"},
        [over("all_reduce", 4, DP), over("all_reduce", 4, TP)],
        [over("all_reduce", 4, BOTH)],
    ),
    "two sums for one over two axes": (
        {"joined_axes"},
        [over("all_reduce", 4, BOTH)],
        [over("all_reduce", 4, TP), over("all_reduce", 4, DP)],
    ),
    "reduced over both axes before it is scattered": (
        {"reduced_before_scattered"},
        [over("reduce_scatter", 64, TP), over("all_reduce", 32, DP)],
        [over("all_reduce", 64, BOTH)],
    ),
    "buckets of weight and bias, of which the bias is reduced over both axes": (
        {"unfused_reduce_scatter", "reduced_before_scattered"},
        [*[over("reduce_scatter", 80, TP)] * 2, *[over("all_reduce", 40, DP)] * 2],
        [over("all_reduce", 128, TP), over("all_reduce", 64, DP), over("all_reduce", 32, BOTH)],
    ),
    "buckets of weight and bias, of which the bias is not scattered": (
        {"unfused_reduce_scatter"},
        [over("reduce_scatter", 80, TP)] * 2,
        [over("reduce_scatter", 128, TP), over("all_reduce", 32, TP)],
    ),
    "buckets reduced over two axes, where one of each is reduced over both and the shards of the others": (
        {"fused_reduce_scatter", "joined_axes", "scattered_before_reduced"},
        [*[over("all_reduce", 80, TP)] * 2, *[over("all_reduce", 80, DP)] * 2],
        [over("reduce_scatter", 128, TP), over("all_reduce", 64, DP), over("all_reduce", 32, BOTH)],
    ),
    "a bucket of which all but the loss is scattered": (
        {"fused_reduce_scatter"},
        [over("all_reduce", 160, TP), over("all_reduce", 164, TP)],
        [over("reduce_scatter", 320, TP), over("all_reduce", 4, TP)],
    ),
    "more groups": (
        {"more_groups"},
        [over("all_reduce", 64, ((2, 3),))],
        [replace(over("all_reduce", 64, TP), computation="main")],
    ),
    "a ring for a gather": (
        {"ring"},
        [over("all_gather", 64, BOTH)],
        [permute(16, [(0, 1), (1, 2), (2, 3), (3, 0)], "backward")] * 3,
    ),
    "a looped ring for a reduce_scatter": (
        {"ring", "loop"},
        [over("reduce_scatter", 64, BOTH)],
        [permute(16, [(0, 1), (1, 2), (2, 3), (3, 0)], "backward", times=3)],
    ),
    "one peer": (
        {"one_peer"},
        [over("all_to_all", 64, TP)],
        [permute(32, [(0, 1), (1, 0), (2, 3), (3, 2)], "backward")],
    ),
    "tokens gathered whole": (
        {"gather_and_scatter"},
        [over("all_to_all", 64, BOTH, "forward")],
        [derived(over("all_gather", 128, BOTH, "forward"))],
    ),
    "weights gathered": (
        {"weight_gathered"},
        [over("all_gather", 64, BOTH, "forward"), over("reduce_scatter", 64, BOTH)],
        [
            replace(derived(over("all_gather", 400, BOTH, "forward"), "params[0]"), moves="parameter"),
            over("reduce_scatter", 400, BOTH),
        ],
    ),
}


def with_parts(one: Record) -> Record:
    """The one record whose parts have two types."""
    if one.dtype != "bfloat16+float32":
        return one
    return replace(one, parts=(Part("float32", 64), Part("bfloat16", 32), Part("float32", 64)))


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_rewrite_is_found_under_its_rule(name):
    rules, left, right = EXPLAINED[name]
    right = [with_parts(one) for one in right]
    row = only_row(left, right)
    assert (row.verdict, set(row.rules)) == ("rewritten", rules)
    assert row.bytes == {"left": step_bytes(left), "right": step_bytes(right)}
    assert not row.unexplained
    for rule in rules:
        assert WHY[rule] in row.why


def test_every_rule_has_an_example():
    explained = {rule for rules, _, _ in EXPLAINED.values() for rule in rules}
    elsewhere = {"resharded", "reduced_every_tick", "other_ranks"}  # test_diff_lookalikes.py
    elsewhere |= {"gathered_every_tick"}  # test_diff_gradients.py
    elsewhere |= {"homeward", "sent_again", "summed_early", "run_whole"}  # test_diff_partitioner.py
    elsewhere |= {"samples_gathered"}  # test_diff_layouts.py
    assert explained | elsewhere == set(WHY) and not explained & elsewhere
