"""Differences that only look like a rewrite must not be explained, and rules tell two causes apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardiff.diff.rows import align, unexplained
from shared_tests.tool.diff_records import BOTH, DP, FOURS, PP, TP, derived, looped, only_row, over, permute, rec

LOOKS_ALIKE = {
    "a gather of weights and the scattered sum of their gradients": (
        [rec("all_gather", 64, "forward"), rec("reduce_scatter", 64)],
        [rec("all_reduce", 64)],
    ),
    "a gather before the scattered sum": ([rec("all_gather", 64), rec("reduce_scatter", 64)], [rec("all_reduce", 64)]),
    "halves in two phases": (
        [rec("reduce_scatter", 64), rec("all_gather", 64, "update")],
        [rec("all_reduce", 64, "forward")],
    ),
    "a gathered parameter is no half": (
        [rec("reduce_scatter", 64), rec("all_gather", 64, moves="parameter")],
        [rec("all_reduce", 64)],
    ),
    "a broadcast of a bias and a gradient": ([rec("broadcast", 64, "update")], [rec("all_reduce", 64, "backward")]),
    "an int32 broadcast and a float32 sum": ([rec("broadcast", 64, dtype="int32")], [rec("all_reduce", 64)]),
    "sums reduced in another way": (
        [rec("all_reduce", 64, reduction="sum"), rec("all_reduce", 32, reduction="sum")],
        [rec("all_reduce", 96, reduction="max")],
    ),
    "gathers of a parameter and of an activation": (
        [rec("all_gather", 64, moves="parameter"), rec("all_gather", 32, moves="activation")],
        [rec("all_gather", 96, moves="parameter")],
    ),
    "masks beside floats": (
        [rec("all_gather", 64), rec("all_gather", 16, dtype="bool")],
        [rec("all_gather", 80)],
    ),
    "a gradient reduced twice": ([rec("all_reduce", 64, moves="gradient")] * 2, [derived(rec("all_reduce", 64))]),
    "a call of a program too many": (
        [rec("all_reduce", 64, source="a.py:1")],
        [rec("all_reduce", 64, source="a.py:1")] * 2,
    ),
    "a second gather in the forward pass": (
        [rec("all_gather", 64, "forward")],
        [rec("all_gather", 64, "forward")] * 2,
    ),
    "a backward sum of the size of a forward one": (
        [rec("all_reduce", 64, "forward")],
        [rec("all_reduce", 64, "forward"), rec("all_reduce", 64, "backward", source="a.py:2")],
    ),
    "more groups than another program that is not compiled": (
        [over("all_reduce", 64, ((2, 3),))],
        [over("all_reduce", 64, TP)],
    ),
    "buckets whose shards do not add up": (
        [over("reduce_scatter", 80, TP), over("all_reduce", 40, DP)],
        [over("all_reduce", 64, TP), over("all_reduce", 28, DP), over("all_reduce", 16, BOTH)],
    ),
    "two sums over one axis": ([over("all_reduce", 4, TP)] * 2, [over("all_reduce", 4, BOTH)]),
    "axes that do not multiply": (
        [over("all_reduce", 4, FOURS), over("all_reduce", 4, ((0, 1), (2, 3), (4, 5), (6, 7)))],
        [over("all_reduce", 4, (tuple(range(8)),))],
    ),
    "a shard of another size": (
        [over("reduce_scatter", 64, TP), over("all_reduce", 16, DP)],
        [over("all_reduce", 64, BOTH)],
    ),
    "a ring with a step too few": (
        [over("all_gather", 64, BOTH)],
        [permute(16, [(0, 1), (1, 2), (2, 3), (3, 0)], "backward")] * 2,
    ),
    "a ring over other ranks": ([over("all_gather", 64, FOURS)], [permute(16, [(0, 4), (4, 0)], "backward")] * 3),
    "an exchange with more than one peer": (
        [over("all_to_all", 64, BOTH)],
        [permute(32, [(0, 1), (1, 0), (2, 3), (3, 2)], "backward")],
    ),
    "gathers that the program asks for": (
        [over("all_to_all", 64, BOTH, "forward")],
        [derived(over("all_gather", 128, BOTH, "forward"), "shard_map/all_gather")],
    ),
    "gathers of a mask, which is no exchange of activations": (
        [over("all_to_all", 64, BOTH, "forward")],
        [derived(rec("all_gather", 128, "forward", groups=BOTH, dtype="bool"))],
    ),
    "gathers of fewer tokens than are exchanged": (
        [over("all_to_all", 64, BOTH, "forward")],
        [derived(over("all_gather", 32, BOTH, "forward"))],
    ),
    "one gather for two exchanges": (
        [over("all_to_all", 64, BOTH, "forward")] * 2,
        [derived(over("all_gather", 128, BOTH, "forward"))],
    ),
    "weights that both sides gather": (
        [replace(over("all_gather", 400, BOTH, "forward"), moves="parameter"), over("reduce_scatter", 400, BOTH)],
        [
            replace(derived(over("all_gather", 160, BOTH, "forward"), "params[0]"), moves="parameter"),
            derived(over("all_gather", 48, BOTH, "forward")),
        ],
    ),
    "an exchange that the program asks for": ([], [derived(over("all_to_all", 64, BOTH), "shard_map/all_to_all")]),
    "a sum too few in the forward pass, where no addends are added up": (
        [rec("all_reduce", 64, "forward")],
        [derived(rec("all_reduce", 64, "forward"))] * 2,
    ),
    "a count, which is no loss": (
        [rec("all_reduce", 64)],
        [derived(rec("all_reduce", 64)), derived(rec("all_reduce", 4, dtype="int32"))],
    ),
    "a loss that both sum, and one of them twice": (
        [rec("all_reduce", 64), rec("all_reduce", 4)],
        [derived(rec("all_reduce", 64)), derived(rec("all_reduce", 4)), derived(rec("all_reduce", 4, "forward"))],
    ),
    "a loss that one of two traced programs sums": (
        [rec("all_reduce", 64)],
        [rec("all_reduce", 64), rec("all_reduce", 4)],
    ),
    "executions of a loop that is no pipeline's": (
        [rec("all_reduce", 64)] * 2,
        [looped(rec("all_reduce", 64), 4)],
    ),
}


@pytest.mark.parametrize("name", LOOKS_ALIKE)
def test_what_only_looks_like_a_rewrite_is_not_explained(name):
    left, right = LOOKS_ALIKE[name]
    assert unexplained(align(left, right)) > 0
    assert unexplained(align(right, left)) > 0


def test_gathers_again_are_of_one_gather_each():
    forward, backward = rec("all_gather", 64, "forward"), rec("all_gather", 64, "backward")
    rows = align([forward, forward], [forward, forward, backward, backward])
    assert [(row.left, row.right, row.rules) for row in rows] == [
        ((forward,), (forward, backward), ("gathered_again",))
    ] * 2
    twice = looped(backward, 2)
    assert only_row([forward], [twice]).rules == ("loop", "moved", "gathered_again")


def test_what_every_tick_of_a_pipeline_repeats_is_told_from_what_it_needs():
    """4 stages, 3 microbatches, 6 ticks: activations are summed in each tick, a gradient once as written."""
    ring = permute(8, PP, times=6)
    activations = [rec("all_reduce", 64, "forward")] * 3
    (row,) = [row for row in align(activations, [ring, looped(rec("all_reduce", 64, "forward"), 6)]) if row.left]
    assert row.rules == ("loop", "bubble_ticks") and row.bytes["right"] == 2 * row.bytes["left"]
    several = [rec("all_reduce", 64, "forward")] * 6  # two in each tick, in a program without a loop
    rows = align([*several, *[permute(8, PP)] * 5], [*several * 2, *[permute(8, PP)] * 5])
    assert {row.rules for row in rows} == {(), ("bubble_ticks",)} and not unexplained(rows)
    gradient = rec("all_reduce", 400)
    (row,) = [row for row in align([gradient], [ring, looped(gradient, 6)]) if row.left]
    assert row.rules == ("loop", "reduced_every_tick") and row.bytes["right"] == 6 * row.bytes["left"]
    stacked = replace(rec("all_reduce", 24), computation="main")  # the loss of every tick in one call
    (row,) = [row for row in align([rec("all_reduce", 4)], [ring, stacked]) if row.left]
    assert row.rules == ("reduced_every_tick",) and row.bytes["right"] == 6 * row.bytes["left"]


def test_a_conflict_of_layouts_is_told_by_what_a_compiler_moves_for_it():
    asked = over("all_gather", 640, BOTH, "forward")
    moves = [
        derived(over(op, size, BOTH), "transpose(jvp())/mul") for op, size in (("all_to_all", 8), ("all_gather", 64))
    ]
    rows = align([asked], [asked, *moves])
    assert [(row.verdict, row.rules) for row in rows] == [("same", ()), *[("rewritten", ("resharded",))] * 2]
    assert [row.bytes["left"] for row in rows[1:]] == [0, 0]
    assert unexplained(align([asked], [asked, moves[1]])) == 1  # a gather by itself is no sign of a conflict


def test_a_shard_reduced_whole_is_told_where_the_whole_is_scattered():
    left = [over("reduce_scatter", 64, TP), over("all_reduce", 32, DP)]
    right = [over("all_reduce", 64, DP), over("reduce_scatter", 64, TP)]
    rows = align(left, right)
    assert [row.rules for row in rows] == [(), ("reduced_before_scattered",)]
    assert unexplained(align(left[1:], right[:1])) == 2  # without a scatter the sizes are no more than sizes


def test_other_ranks_are_no_explanation():
    row = only_row([over("all_reduce", 64, DP)], [over("all_reduce", 64, TP)])
    assert row.rules == ("other_ranks",) and row.unexplained and unexplained([row]) == 1
    rows = align(
        [over("all_reduce", 64, DP), over("all_reduce", 4, TP)], [over("all_reduce", 64, TP), over("all_reduce", 4, DP)]
    )
    assert [row.rules for row in rows] == [("other_ranks",)] * 2
    around = only_row([permute(8, [(0, 1), (1, 0)])], [permute(8, [(0, 2), (2, 0)])])
    assert around.rules == ("edges", "other_ranks") and around.unexplained


def test_axes_that_the_caller_maps_are_the_same_ranks():
    left = [replace(over("all_reduce", 64, DP), axis="dp"), replace(over("all_reduce", 4, BOTH), axis="dp,tp")]
    right = [replace(over("all_reduce", 64, TP), axis="data"), replace(over("all_reduce", 4, BOTH), axis="model,data")]
    axes = {"dp": "data", "tp": "model"}
    assert [row.verdict for row in align(left, right, axes)] == ["same", "same"]
    assert [row.rules for row in align(left, right)] == [("other_ranks",), ()]
    assert [row.rules for row in align(left, right, {"dp": "model"})] == [("other_ranks",), ()]
