"""Which rank holds what: every element is held, counted once, and merged back in its place."""

from __future__ import annotations

import numpy as np
import pytest

from contract.axes import AXES, STRATEGIES, one_axis, parse_axes
from contract.layout import cut, layout, merge, owned
from contract.problem import Layer, Problem
from contract.share import names
from contract.strategy import Run

CASES = [
    Run("torch", one_axis(strategy, degree), Problem(batch=8, width=8, layers=layers), microbatches=1)
    for strategy in AXES
    for degree in (1, 2, 4)
    for layers in (4, 6, 7)
    if not (strategy == "single_device" and degree > 1) and not (strategy == "megatron_tensor_parallel" and layers % 2)
]
every_case = pytest.mark.parametrize("run", CASES, ids=lambda run: f"{run.strategy}-{run.mesh}-{run.problem.layers}")


@every_case
def test_merge_is_the_inverse_of_cut(run):
    params = run.problem.parameters()
    merged = merge(run, [cut(params, parts) for parts in layout(run)])
    for got, want in zip(merged, params, strict=True):
        np.testing.assert_array_equal(got.w, want.w)
        np.testing.assert_array_equal(got.b, want.b)


@every_case
def test_owners_hold_every_element_once(run):
    params = run.problem.parameters()
    elements = [
        value
        for parts, flags in zip(layout(run), owned(run), strict=True)
        for layer, owns in zip(cut(params, parts), flags, strict=True)
        for array, own in zip(layer, owns, strict=True)
        if own
        for value in array.ravel().tolist()
    ]
    assert sorted(elements) == sorted(value for layer in params for a in layer for value in a.ravel().tolist())


@every_case
def test_merge_needs_only_what_the_owners_hold(run):
    params = run.problem.parameters()
    shards = [
        [Layer(*(a if own else None for a, own in zip(layer, owns, strict=True))) for layer, owns in pairs]
        for pairs in (
            zip(cut(params, parts), flags, strict=True) for parts, flags in zip(layout(run), owned(run), strict=True)
        )
    ]
    for got, want in zip(merge(run, shards), params, strict=True):
        np.testing.assert_array_equal(got.w, want.w)
        np.testing.assert_array_equal(got.b, want.b)


SHAPES = {  # of w and b in layers 0 and 1 on 4 ranks, width 8
    "data_parallel": (((8, 8), (8,)), ((8, 8), (8,))),
    "tensor_parallel": (((8, 2), (2,)), ((8, 2), (2,))),
    "megatron_tensor_parallel": (((8, 2), (2,)), ((2, 8), (8,))),
    "fully_sharded": (((2, 8), (2,)), ((2, 8), (2,))),
    "zero1": (((8, 8), (8,)), ((8, 8), (8,))),
    "zero2": (((8, 8), (8,)), ((8, 8), (8,))),
}


@pytest.mark.parametrize("strategy", SHAPES)
@pytest.mark.parametrize("rank", range(4))
def test_shapes_by_hand(strategy, rank):
    run = Run("torch", one_axis(strategy, 4), Problem(batch=8, width=8, layers=2))
    shards = cut(run.problem.parameters(), layout(run)[rank])
    assert tuple((layer.w.shape, layer.b.shape) for layer in shards) == SHAPES[strategy]


@pytest.mark.parametrize(
    ("strategy", "split"),
    [
        ("fully_sharded", ["parameters", "gradients", "optimizer_state"]),
        ("zero1", ["optimizer_state"]),
        ("zero2", ["gradients", "optimizer_state"]),
        ("data_parallel", []),
    ],
)
def test_what_zero_splits_by_rows(strategy, split):
    run = Run("torch", one_axis(strategy, 4), Problem(batch=8, width=8, layers=2))
    for of in ("parameters", "gradients", "optimizer_state"):
        w, b = cut(run.problem.parameters(), layout(run, of)[1])[0]
        assert (w.shape, b.shape) == (((2, 8), (2,)) if of in split else ((8, 8), (8,)))


def test_the_deeper_strategy_cuts_first_whatever_its_place_in_the_mesh():
    for mesh in ("fsdp=2,tp=2", "tp=2,fsdp=2"):
        run = Run("torch", parse_axes(mesh), Problem(batch=8, width=8, layers=2))
        held = [
            layout(run)[2 if mesh.startswith("fsdp") else 1][i].cuts.w for i in (0, 1)
        ]  # second of fsdp, first of tp
        assert held == [(slice(4, 8), slice(0, 4)), (slice(2, 4), slice(None))], mesh


def test_megatron_splits_columns_and_rows_in_turn():
    run = Run("torch", one_axis("megatron_tensor_parallel", 2), Problem(batch=8, width=8, layers=6))
    shapes = [layer.w.shape for layer in cut(run.problem.parameters(), layout(run)[1])]
    assert shapes == [(8, 4), (4, 8)] * 3


def test_tensor_parallel_rank_1_of_2_holds_the_second_half_of_the_columns():
    run = Run("torch", one_axis("tensor_parallel", 2), Problem(batch=8, width=4, layers=1))
    (full,), (mine,) = run.problem.parameters(), cut(run.problem.parameters(), layout(run)[1])
    np.testing.assert_array_equal(mine.w, full.w[:, 2:])
    np.testing.assert_array_equal(mine.b, full.b[2:])


def test_stages_hold_consecutive_layers_the_first_ones_more():
    run = Run("torch", one_axis("pipeline_parallel", 4), Problem(batch=8, width=4, layers=7))
    held = [[name for part in parts for name in names(part)] for parts in layout(run)]
    assert held == [["w0", "b0", "w1", "b1"], ["w2", "b2", "w3", "b3"], ["w4", "b4", "w5", "b5"], ["w6", "b6"]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_merge_refuses_a_shard_of_another_shape(strategy):
    run = Run("torch", one_axis(strategy, 2), Problem(batch=8, width=4, layers=2), microbatches=1)
    shards = [cut(run.problem.parameters(), parts) for parts in layout(run)]
    shards[0][0] = Layer(np.zeros((3, 4)), shards[0][0].b)
    columns = 2 if strategy in ("tensor_parallel", "megatron_tensor_parallel") else 4
    rows = 2 if strategy == "fully_sharded" else 4
    with pytest.raises(ValueError, match=rf"^rank 0 holds w0 as \(3, 4\) where the layout says \({rows}, {columns}\)$"):
        merge(run, shards)
    layers = 1 if strategy == "pipeline_parallel" else 2
    with pytest.raises(ValueError, match=f"^rank 0 holds 0 layers where the layout says {layers}$"):
        merge(run, [[], shards[1]])


@every_case
def test_merge_keeps_the_dtype(run):
    params = [Layer(w.astype(np.float32), b.astype(np.float32)) for w, b in run.problem.parameters()]
    merged = merge(run, [cut(params, parts) for parts in layout(run)])
    assert {a.dtype for layer in merged for a in layer} == {np.dtype(np.float32)}
