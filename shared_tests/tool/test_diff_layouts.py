"""Rules for what a partitioner moves instead of something else; each with what only looks like it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardiff.diff.rows import align, unexplained
from shardiff.record import Part, Record
from shared_tests.tool.diff_records import BOTH, DP, PP, TP, derived, looped, only_row, over, permute, rec

BATCH, WIDTH, FEATURES = 8, 16, 24  # of X[B, D] and W[D, F], over the 4 ranks of BOTH
GRADIENT = replace(over("reduce_scatter", 4 * (WIDTH + 1) * FEATURES, BOTH), moves="gradient")  # with that of b[F]
Z = replace(derived(over("all_gather", 4 * BATCH * FEATURES, BOTH), "transpose(jvp())/dot_general"))
Z = replace(Z, shape=(BATCH, FEATURES))
X = derived(over("all_to_all", 4 * BATCH * WIDTH // 4, BOTH, "forward"), "jvp()/mul")
BIAS = replace(derived(over("all_reduce", 4 * FEATURES, BOTH), "transpose(jvp())/reduce_sum"), shape=(FEATURES,))


def rules(left: list[Record], right: list[Record]) -> list[tuple[str, ...]]:
    rows = align(left, right)
    assert unexplained(rows) == 0, [row.why for row in rows]
    return [row.rules for row in rows]


def test_samples_may_be_gathered_instead_of_gradients_summed():
    assert rules([GRADIENT], [X, Z, BIAS]) == [("samples_gathered",)]
    alone = replace(over("all_reduce", 4 * WIDTH * FEATURES, BOTH), moves="gradient")
    assert rules([alone], [X, Z]) == [("samples_gathered",)]
    half = [replace(one, dtype="bfloat16", payload_bytes=one.payload_bytes // 2) for one in (X, Z)]
    assert rules([alone, alone], [*half, X, Z]) == [("samples_gathered",)] * 2
    named = replace(X, detail="batch.x", phase="backward")
    assert rules([alone], [named, Z]) == [("samples_gathered",)]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([GRADIENT], [X, Z]),  # without the sum of the bias's gradient
        ([GRADIENT], [X, BIAS]),
        ([GRADIENT], [Z, BIAS]),
        ([replace(GRADIENT, moves=None)], [X, Z, BIAS]),
        ([GRADIENT], [replace(X, detail="shard_map/all_to_all"), Z, BIAS]),
        ([GRADIENT], [X, replace(Z, detail="shard_map/all_gather"), BIAS]),
        ([GRADIENT], [X, replace(Z, shape=(2 * BATCH, FEATURES // 2)), BIAS]),  # of another W
        ([GRADIENT], [replace(X, payload_bytes=X.payload_bytes * 2), Z, BIAS]),
        ([replace(over("reduce_scatter", GRADIENT.payload_bytes, DP), moves="gradient")], [X, Z, BIAS]),
        ([GRADIENT, BIAS], [X, Z, BIAS, derived(over("reduce_scatter", 4 * WIDTH * FEATURES, BOTH))]),  # summed, too
        ([GRADIENT, GRADIENT], [X, Z, BIAS]),
    ],
    ids=range(11),
)
def test_samples_that_are_not_those_of_the_gradient_explain_nothing(left, right):
    rows = align(left, right)
    assert unexplained(rows) > 0
    assert left == [GRADIENT] * 2 or not any("samples_gathered" in row.rules for row in rows)


UNIT_BYTES = 4 * (WIDTH + 1) * FEATURES
WRITTEN = [
    over("all_gather", UNIT_BYTES, BOTH, "forward"),  # flat, so that nothing tells what it is but its gradient
    replace(over("all_gather", 4 * WIDTH * FEATURES, BOTH), moves="parameter"),
    GRADIENT,
]
Y = replace(over("reduce_scatter", 4 * BATCH * FEATURES, BOTH, "forward"), computation="main", shape=(BATCH, FEATURES))
VECTOR = derived(over("all_gather", 4 * FEATURES, BOTH, "forward"), "params[0].b")
STAYS = [Y, VECTOR, X, Z, BIAS]


def test_weights_may_stay_where_they_are_while_their_vectors_are_gathered():
    assert rules(WRITTEN, STAYS) == [("weight_gathered",), ("samples_gathered",)]
    assert rules(WRITTEN * 2, STAYS * 2) == [("weight_gathered",), *[("samples_gathered",)] * 2]
    for right in (STAYS[1:], [replace(Y, shape=(FEATURES, BATCH)), *STAYS[1:]], [Y, *STAYS], [VECTOR, *STAYS]):
        assert unexplained(align(WRITTEN, right)) > 0


def test_a_gather_by_sum_is_no_reduction_and_may_be_repeated():
    gather = replace(rec("all_reduce", 64, "forward"), computation="main", gathers=True)
    again = replace(gather, phase="backward")
    assert rules([rec("all_gather", 64, "forward")], [gather, again]) == [("gather_by_sum", "gathered_again")]
    for right in ([gather, replace(again, gathers=False)], [again, again]):
        assert unexplained(align([rec("all_gather", 64, "forward")], right)) > 0
    assert unexplained(align([rec("reduce_scatter", 64)], [again])) == 2
    both = (Part("float32", 60), Part("float32", 8, gathers=True), Part("float32", 4))
    combined = replace(
        rec("all_reduce", 72, "update"), computation="main", parts=both
    )  # with the gradients of the loss
    left = [rec("reduce_scatter", 64, moves="gradient"), rec("all_gather", 8, "update")]
    assert unexplained(align(left, [combined])) == 0


def test_only_some_tensors_are_summed_over_a_second_axis():
    written = [over("reduce_scatter", 160, TP), over("all_reduce", 32, DP)]
    found = align(written, [over("reduce_scatter", 128, TP), over("all_reduce", 32, BOTH)])
    assert unexplained(found) == 0 and {rule for row in found for rule in row.rules} == {
        "unfused_reduce_scatter",
        "joined_axes",
    }
    for sizes in ((128, 28), (124, 32), (132, 28)):
        right = [over("reduce_scatter", sizes[0], TP), over("all_reduce", sizes[1], BOTH)]
        assert unexplained(align(written, right)) > 0, sizes


def test_shards_as_large_together_as_one_tensor_are_two_tensors():
    scatter, gains = over("reduce_scatter", 640, TP), [over("all_reduce", 64, DP)] * 2
    shards = replace(over("all_reduce", 64, DP), parts=(Part("float32", 32), Part("float32", 32)))
    assert rules([scatter, *gains], [scatter, shards]) == [(), ("scattered_before_reduced", "combined")]
    assert rules([scatter, shards], [scatter, *gains]) == [(), ("reduced_before_scattered",)]
    assert unexplained(align(gains, [shards])) == 1  # nothing is scattered
    assert unexplained(align([scatter, *gains, gains[0]], [scatter, shards])) > 0
    gain = over("all_reduce", 16, DP)  # which the other side reduces over both axes at once
    right = [over("reduce_scatter", 640 - 16, TP), shards, over("all_reduce", 16, BOTH)]
    found = [row.rules for row in align([scatter, *gains, gain], right)]
    assert found == [("unfused_reduce_scatter", "joined_axes"), ("scattered_before_reduced", "combined")]
    assert unexplained(align([scatter, *gains, gain], right[:2])) > 0
    activation = over("reduce_scatter", 128, DP)  # what is as large is more alike than what is half as large
    rows = align([scatter, gains[0], activation], [scatter, over("all_reduce", 128, DP)])
    assert [row.rules for row in rows if not row.unexplained] == [(), ("unfused_reduce_scatter",)]


def test_sums_in_one_call_are_the_addends_of_one():
    early = replace(derived(rec("all_reduce", 128)), shape=(2, 4, 4))
    q_k_v = derived(rec("all_reduce", 192, parts=(64, 64, 64)))
    rows = align([rec("all_reduce", 64)] * 2, [early, q_k_v])
    assert unexplained(rows) == 0 and {row.rules for row in rows} == {("summed_early",), ("reduced_one_by_one",)}
    apart = [derived(rec("all_reduce", 64)) for _ in range(2)]
    assert unexplained(align([rec("all_reduce", 64)] * 2, [early, *apart])) == 1


def test_addends_are_as_large_as_their_sum():
    """Buckets of gradients, of which some were matched, are no addends of one another."""
    left = [rec("reduce_scatter", 96)] * 2
    right = [derived(rec("reduce_scatter", 64)), derived(rec("all_reduce", 32))]
    assert unexplained(align(left, right)) == 1


def test_one_row_has_all_that_stands_for_a_weights_gradient():
    row = only_row([GRADIENT], [X, Z, BIAS])
    assert len(row.right) == 3 and row.bytes["left"] == GRADIENT.wire_bytes


def test_gradients_in_a_pipelines_loop_are_each_needed_once():
    """Else one of 32 bytes in 6 ticks is taken for those of k, q and v, of 32 bytes each, and for one in the bubble."""
    ring = permute(8, PP, times=6)
    gradients = [replace(over("all_reduce", size, DP), moves="gradient") for size in (32, 32, 32, 32, 64)]
    together = replace(looped(over("all_reduce", 96, DP), 6), parts=tuple(Part("float32", size) for size in (32, 64)))
    ticks = [together, looped(over("all_reduce", 96, DP), 6)]
    rows = [row for row in align(gradients, [ring, *ticks]) if row.left]
    assert {rule for row in rows for rule in row.rules} == {"combined", "loop", "reduced_every_tick"}
    assert sum(row.bytes["right"] for row in rows) == 6 * sum(row.bytes["left"] for row in rows)
    layers = [replace(over("all_reduce", 32, DP), moves="gradient") for _ in range(6)]
    scanned = [row for row in align(layers, [ring, looped(over("all_reduce", 32, DP), 6)]) if row.left]
    assert [row.rules for row in scanned] == [("loop",)]
    assert unexplained(align(gradients[1:], [ring, *ticks])) > 1  # the ring is one


def test_weights_gathered_with_their_gradients_stand_for_activations_before_these_are_taken_for_moved():
    """As where attention is split by the sequence: weights, K and V are gathered, and their sums scattered."""
    written = [
        over(op, 64, BOTH, phase) for phase in ("forward", "backward") for op in ("all_gather", "reduce_scatter")
    ]
    weight = replace(derived(over("all_gather", 64, BOTH, "forward"), "params[0].q"), moves="parameter")
    kept = [derived(over("all_gather", 64, BOTH, "forward")), derived(over("reduce_scatter", 64, BOTH), "dot_general")]
    gathered = [weight, over("reduce_scatter", 64, BOTH)]
    assert {rule for row in align(written, [*kept, *gathered]) for rule in row.rules} == {"weight_gathered"}
    more = [*kept, *kept, *gathered]  # K and V are as much together as the two sums that there are not
    assert unexplained(align(written, more)) == 0
    for right in ([*kept, weight], [*kept, weight, *gathered]):
        assert unexplained(align(written, right)) > 0
    activations = [written[0], written[3]]
    assert unexplained(align(activations, [*kept, *gathered])) > 0  # the other side sums nothing in the forward pass
