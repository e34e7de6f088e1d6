"""Gradients summed over several axes, tensor by tensor; and what a pipeline does so in every tick. With lookalikes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardiff.diff.rows import align, unexplained
from shardiff.record import Part, Record
from shared_tests.tool.diff_records import PP, derived, looped, over, permute, rec

FSDP, CP, DP = (  # of a mesh of 2 x 2 x 2
    ((0, 1), (2, 3), (4, 5), (6, 7)),
    ((0, 2), (1, 3), (4, 6), (5, 7)),
    ((0, 4), (1, 5), (2, 6), (3, 7)),
)
CP_DP, ALL = ((0, 2, 4, 6), (1, 3, 5, 7)), (tuple(range(8)),)


def gradient(op: str, size: int, groups: tuple[tuple[int, ...], ...]) -> Record:
    return replace(over(op, size, groups), moves="gradient")


def sums(groups: tuple[tuple[int, ...], ...], *shapes: tuple[int, ...], op: str = "all_reduce") -> Record:
    """One compiled call for arrays of these shapes."""
    sizes = []
    for shape in shapes:
        size = 4
        for length in shape:
            size *= length
        sizes.append(size)
    parts = tuple(Part("float32", size, shape) for size, shape in zip(sizes, shapes, strict=True))
    return replace(derived(over(op, sum(sizes), groups)), parts=parts)


WRITTEN = [gradient("reduce_scatter", 4 * (64 + 32 + 8), FSDP)]  # of [8, 8], [8, 4] and [8] in one flat buffer
WRITTEN += [gradient("all_reduce", 4 * size // 2, axis) for axis in (CP, DP) for size in (64, 32, 8)]
WHOLE = [
    sums(FSDP, (8, 8), (8, 4)),
    sums(CP_DP, (4, 8), (8, 4)),
    sums(CP, (8,)),
    sums(((0, 1, 4, 5), (2, 3, 6, 7)), (8,)),
]


def test_each_tensor_is_followed_over_all_axes():
    """[8, 8] becomes a shard before it crosses the other axes, which is as large as [8, 4], which does not."""
    (row,) = align(WRITTEN, WHOLE)
    assert row.rules == ("unfused_reduce_scatter", "joined_axes", "reduced_before_scattered")
    assert row.bytes == {"left": sum(r.wire_bytes for r in WRITTEN), "right": sum(r.wire_bytes for r in WHOLE)}
    (row,) = align(WHOLE, WRITTEN)
    assert row.rules == ("fused_reduce_scatter", "joined_axes", "scattered_before_reduced")
    replicas = [gradient("all_reduce", 4 * size, axis) for axis in (FSDP, CP, DP) for size in (64, 32, 8)]
    (row,) = align(replicas, WHOLE)
    assert row.rules == ("joined_axes", "scattered_before_reduced")


@pytest.mark.parametrize(
    "derived_sums",
    [
        WHOLE[:3],  # the vector is not summed over the last axis
        [*WHOLE[:2], WHOLE[2], sums(((0, 1, 2, 3), (4, 5, 6, 7)), (8,))],  # it is summed over one axis twice
        [WHOLE[0], sums(CP_DP, (4, 8)), *WHOLE[2:]],  # a matrix is not summed over the others
        [WHOLE[0], sums(CP_DP, (4, 8), (2, 8)), *WHOLE[2:]],  # no slice of the other matrix
        [WHOLE[0], sums(CP, (4, 8), (8, 4)), *WHOLE[2:]],  # over one of the others only
        [sums(FSDP, (8, 8)), *WHOLE[1:]],  # a matrix is not summed over the axis that scatters it
        [*WHOLE, sums(CP_DP, (4, 8))],  # one is summed twice
        [WHOLE[0], sums(CP_DP, (2, 8), (8, 4)), *WHOLE[2:]],  # a quarter, where the axis has two ranks
        [replace(one, phase="forward") for one in WHOLE],
        [replace(one, reduction="max") for one in WHOLE],
    ],
    ids=range(10),
)
def test_a_tensor_that_is_not_summed_once_over_every_axis_is_not_explained(derived_sums):
    assert unexplained(align(WRITTEN, derived_sums)) > 0
    assert unexplained(align(derived_sums, WRITTEN)) > 0


def test_a_sum_of_an_activation_as_large_as_a_gradient_is_left_for_its_own_counterpart():
    activations = [over("reduce_scatter", 4 * 32, CP)] * 2
    rows = align([*WRITTEN, *activations], [sums(CP, (2, 4, 4), (2, 4, 4)), *WHOLE])
    assert unexplained(rows) == 0
    assert [row.rules for row in rows if row.left[0] in activations] == [("unfused_reduce_scatter", "combined")]


def test_over_one_axis_activations_are_told_from_gradients_by_what_the_others_are_in_total():
    """Two gradients of 16 elements are as much as one activation of 32."""
    written = [over("reduce_scatter", 4 * 32, CP), over("reduce_scatter", 4 * 32, CP)]
    written = [replace(one, moves="activation") for one in written]
    written += [gradient("all_reduce", 4 * size, CP) for size in (16, 16, 16, 16)]
    compiled = [sums(CP, (2, 4, 4), (2, 4, 4)), sums(CP, (12, 4), (4, 4))]  # 48 are of q, k and v
    rows = align(written, compiled)
    assert unexplained(rows) == 0
    assert {row.rules for row in rows} == {("unfused_reduce_scatter", "combined"), ("combined",)}
    assert unexplained(align(written, [compiled[0], sums(CP, (12, 4))])) > 0


def test_tensors_are_followed_through_every_tick_of_a_pipeline():
    ring = permute(8, PP, times=6)
    ticks = [looped(one, 6) for one in WHOLE]
    (row,) = [row for row in align(WRITTEN, [ring, *ticks]) if row.left]
    assert "reduced_every_tick" in row.rules and row.bytes["right"] == 6 * sum(one.wire_bytes for one in WHOLE)
    assert (
        unexplained(align(WRITTEN, [ring, *(looped(one, 5) for one in WHOLE)])) > 1
    )  # of another loop; the ring is one


def test_parameters_may_be_gathered_in_every_tick_but_for_those_whose_gather_was_moved_out():
    """As written from flat buffers; in the loop 32 and 16 of them, before it 80, and again in the backward pass 32."""
    ring = permute(8, PP, times=6)
    written = [replace(over("all_gather", size, FSDP, "forward"), moves="parameter") for size in (96, 32)]
    ticks = [looped(derived(over("all_gather", size, FSDP, "forward")), 6) for size in (32, 16)]
    ticks += [derived(over("all_gather", 80, FSDP, "forward")), looped(derived(over("all_gather", 32, FSDP)), 6)]
    (row,) = [row for row in align(written, [ring, *ticks]) if row.left]
    assert row.rules == ("split", "loop", "gathered_again", "gathered_every_tick")
    assert row.bytes["right"] == sum(one.wire_bytes * one.times for one in ticks)
    assert unexplained(align(written[:1], [ring, *ticks])) > 1  # the ring is one
    assert unexplained(align(written, [ring, ticks[0], *ticks])) > 1


def test_what_is_kept_is_what_would_be_gathered_again():
    """Not an activation for a parameter of its size, which nobody gathers then; nor an array of another shape."""
    activation, parameter = (
        replace(over("all_gather", 64, CP, "forward"), moves=m) for m in ("activation", "parameter")
    )
    again, once = replace(parameter, phase="backward"), derived(over("all_gather", 64, CP, "forward"))
    (row,) = align([parameter, again], [once])
    assert row.rules == ("kept",)
    assert unexplained(align([activation, again], [once])) == 1
    assert unexplained(align([once], [activation, again])) == 1
    shaped = [
        replace(derived(over("all_gather", 64, CP, "backward")), shape=shape) for shape in ((4, 4), (2, 8), (16,))
    ]
    found = [align([once], [replace(once, shape=(4, 4)), one]) for one in shaped]
    assert [unexplained(rows) for rows in found] == [0, 1, 0]  # a vector may be a matrix, reshaped


def test_what_is_summed_for_every_microbatch_is_told_from_gradients_of_its_size():
    """4 stages, 3 microbatches, 6 ticks; an activation of 32 elements is reduce_scattered for each microbatch."""
    ring = permute(8, PP, times=6)
    written = [gradient("all_reduce", 4 * size, CP) for size in (32, 32, 64)]
    written += [over("reduce_scatter", 4 * 32, CP)] * 3
    ticks = [looped(sums(CP, (1, 2, 4, 4), (1, 8, 8), (1, 64)), 6)]
    rows = [row for row in align(written, [ring, *ticks]) if row.left]
    assert unexplained(rows) == 0 and {r for row in rows for r in row.rules} > {"bubble_ticks", "reduced_every_tick"}
    twice = [looped(sums(CP, (1, 2, 4, 4), (1, 2, 4, 4), (1, 8, 8), (1, 64)), 6)]
    assert unexplained(align(written, [ring, *twice])) > 1


RING = [(0, 1), (1, 0), (2, 3), (3, 2)]  # inside each of two stages
ONWARD = [permute(8, [(0, 2), (1, 3)], phase) for phase in ("forward", "backward") for _ in range(3)]


def test_what_goes_around_a_ring_does_so_in_the_bubble_too():
    """2 stages, 3 microbatches: as written 3 times around, and 9 times back; in 4 ticks 4 times, and 4 back."""
    written = [permute(16, RING, phase) for phase in ["forward"] * 3 + ["backward"] * 9]
    ticks = [permute(8, RING, phase) for phase in ["forward"] * 8 + ["backward"] * 8]
    rows = align([*written, *ONWARD], [*ticks, *ONWARD])
    assert unexplained(rows) == 0 and any("homeward" in row.rules and "bubble_ticks" in row.rules for row in rows)
    for wrong in (ticks[1:], ticks[:-1], [*ticks, ticks[0]]):
        assert unexplained(align([*written, *ONWARD], [*wrong, *ONWARD])) > 0
    assert unexplained(align(written, ticks)) > 0  # no pipeline
    assert unexplained(align([*written, rec("all_reduce", 4)], [*ticks, rec("all_reduce", 4)])) > 0


def test_the_slice_of_one_tensor_is_not_taken_for_a_slice_of_another():
    """Half of (8, 4) is also half of (4, 8), along the other dim."""
    left = [gradient("reduce_scatter", 4 * 64, FSDP), *[gradient("all_reduce", 4 * 32, CP)] * 2]
    scattered = [sums(FSDP, shape, op="reduce_scatter") for shape in ((4, 8), (8, 4))]
    slices = [sums(CP, shape) for shape in ((4, 4), (2, 8))]
    rows = align(left, [*scattered, *slices])
    assert unexplained(rows) == 0 and any("scattered_before_reduced" in row.rules for row in rows)
    assert unexplained(align(left, [*scattered, slices[0], sums(CP, (16, 1))])) > 0
