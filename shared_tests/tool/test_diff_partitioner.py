"""Rules for what goes around rings, and for where a partitioner sums, gathers, and splits; each with lookalikes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardiff.diff.rows import align, unexplained
from shared_tests.tool.diff_records import derived, only_row, permute, rec

RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
BACK = [(b, a) for a, b in RING]
AROUND = [permute(16, RING) for _ in range(3)]  # forward, n - 1 times
AGAIN = [permute(16, RING, "backward") for _ in range(3 + 4)]
HOME = [permute(8, BACK, "backward") for _ in range(2 * 3)]


def test_what_goes_around_a_ring_is_kept_and_its_gradients_go_back_the_way_it_came():
    rows = align([*AROUND, *AGAIN], [*AROUND, *HOME])
    assert unexplained(rows) == 0 and [row.rules for row in rows] == [(), (), (), ("homeward", "kept")]
    assert rows[-1].bytes == {"left": 7 * 16, "right": 6 * 8}
    rows = align([*AROUND, *HOME], [*AROUND, *AGAIN])
    assert [row.rules for row in rows] == [(), (), (), ("sent_again", "homeward")]
    two = [permute(16, [(0, 1), (1, 0)], phase) for phase in ("forward", "backward", "backward", "backward")]
    rows = align(two, [two[0], *[permute(8, [(1, 0), (0, 1)], "backward")] * 2])
    assert unexplained(rows) == 0 and sum(row.bytes["left"] for row in rows) == 4 * 16


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([*AROUND, *AGAIN[1:]], [*AROUND, *HOME]),  # one step of the way home is missing
        ([*AROUND, *AGAIN], [*AROUND, *HOME[1:]]),
        ([*AROUND, *AGAIN], [*AROUND[1:], *HOME]),
        ([*AROUND, *AGAIN], AROUND),  # no gradients
        ([permute(16, RING[:3])] * 3 + [permute(16, RING[:3], "backward")] * 7, [*AROUND, *HOME]),  # no ring
    ],
    ids=range(5),
)
def test_what_goes_around_a_ring_must_come_home(left, right):
    assert unexplained(align(left, right)) > 0


def test_a_sum_may_be_taken_before_a_linear_operation():
    sums = [rec("all_reduce", 64, "forward") for _ in range(2)]
    early = [replace(derived(rec("all_reduce", 128, "forward")), shape=(2, 4, 4)) for _ in range(2)]
    router = rec("all_reduce", 32, moves="gradient")
    rows = align([*sums, router], early)  # two of 64 bytes are not combined into one of 128
    assert unexplained(rows) == 0 and {row.rules for row in rows} == {("summed_early",)}
    assert [(len(row.left), len(row.right)) for row in rows] == [(2, 1), (1, 1)], "the router's is beside the first"
    for few in (early[:1], [early[0], replace(early[1], detail="jvp()/psum")]):
        rows = align(sums, few)
        assert not any("summed_early" in row.rules for row in rows)
    smaller = replace(early[0], payload_bytes=32, wire_bytes=48)
    assert unexplained(align(sums[:1], [smaller])) == 2
    assert unexplained(align([router], [])) == 1, "no sum is missing without a reason"


def test_one_product_is_not_several_tensors_whose_sizes_add_up():
    """With two slots for every token, a sum over the slots is as large as two over the tokens, and stands for one."""
    sums = [rec("reduce_scatter", 64, shape=(1, 4, 4), moves="activation") for _ in range(2)]
    early = [replace(derived(rec("all_reduce", 128)), shape=(2, 2, 2, 4)) for _ in range(2)]
    rows = align(sums, early)
    assert [row.rules for row in rows] == [("summed_early",)] * 2
    renamed = [replace(one, detail="jvp()/reshape") for one in early]
    assert unexplained(align(sums, renamed[:1])) == 0, "what was reshaped may be both"


def test_gates_are_scattered_beside_the_tokens():
    exchange = rec("all_to_all", 64)
    tokens, gates = derived(rec("reduce_scatter", 128)), derived(rec("reduce_scatter", 16))
    assert {row.rules for row in align([exchange], [tokens, gates])} == {("gather_and_scatter",)}
    assert unexplained(align([], [gates])) == 1


def test_activations_of_one_phase_are_no_gradients_of_another_whose_sizes_add_up():
    activations = [rec("reduce_scatter", 64, "forward", moves="activation") for _ in range(4)]
    for gradients in ([rec("reduce_scatter", 256)], [rec("reduce_scatter", 128), rec("reduce_scatter", 128)]):
        assert unexplained(align(activations, gradients)) == 4 + len(gradients)
        known = [replace(one, moves="activation") for one in gradients]
        assert unexplained(align(activations, known)) == 0


def test_what_a_compiler_does_not_split_runs_whole():
    whole = derived(rec("all_gather", 64, "forward"), "jvp()/top_k")
    assert [(row.verdict, row.rules) for row in align([], [whole])] == [("rewritten", ("run_whole",))]
    for other in (derived(rec("all_gather", 64, "forward")), replace(whole, moves="parameter"), rec("all_gather", 64)):
        assert unexplained(align([], [other])) == 1


def test_short_vectors_of_a_flat_buffer_are_gathered_by_sums():
    right = [rec("all_gather", 64, "forward"), rec("all_gather", 32, "forward"), rec("all_reduce", 4, "forward")]
    row = only_row([rec("all_gather", 100, "forward")], right)
    assert row.rules == ("gather_by_sum", "split")
    row = only_row([rec("reduce_scatter", 100)], [rec("reduce_scatter", 96), rec("all_reduce", 4)])
    assert row.rules == ("unfused_reduce_scatter", "split")
    row = only_row([rec("reduce_scatter", 96), rec("all_reduce", 4)], [rec("reduce_scatter", 100)])
    assert row.rules == ("fused_reduce_scatter", "combined")
    assert unexplained(align([rec("all_gather", 100, "forward")], right[:2])) > 0


def test_what_goes_with_tokens_is_gathered_with_them():
    exchange, gather = rec("all_to_all", 64, "forward"), derived(rec("all_gather", 128, "forward"))
    gates = derived(rec("all_gather", 16, "forward"), "jvp()/mul")
    assert unexplained(align([exchange], [gather, gates])) == 0
    for left, right in (
        ([], [gates]),
        ([exchange], [gates]),
        ([exchange], [gather, replace(gates, phase="backward")]),
        ([exchange], [gather, replace(gates, moves="parameter")]),
        ([exchange], [gather, rec("all_gather", 16, "forward")]),
    ):
        assert unexplained(align(left, right)) > 0
