"""The closed form of every strategy's communication, compared with values worked out by hand for small sizes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from contract.axes import AXES, STRATEGIES, one_axis
from contract.cost import communication
from contract.problem import BYTES, DTYPES, Problem
from contract.strategy import IMPLEMENTATIONS, Run
from shardiff.record import Executions, totals

B, D, L, N, M = 12, 8, 4, 4, 3
RUN = Run("torch", one_axis("data_parallel", N), Problem(B, D, L), microbatches=M)
LOSS = 4  # bytes of the scalar


def records(strategy, implementation="torch", degree=N, **changes):
    return communication(replace(RUN, axes=one_axis(strategy, degree), implementation=implementation, **changes))


def summary(some):
    """(op, phase) -> calls and payload bytes."""
    result: Counter = Counter()
    for r in some:
        result[r.op, r.phase, "calls"] += r.executions.min
        result[r.op, r.phase, "bytes"] += r.payload_bytes * r.executions.min
    return dict(result)


def test_data_parallel_reduces_every_gradient():
    assert summary(records("data_parallel")) == {
        ("all_reduce", "forward", "calls"): 1,
        ("all_reduce", "forward", "bytes"): LOSS,
        ("all_reduce", "backward", "calls"): 8,
        ("all_reduce", "backward", "bytes"): 4 * (64 + 8) * 4,  # L (D^2 + D) e
    }


def test_data_parallel_gradients_come_last_layer_first_and_bias_before_weight():
    backward = [r.detail for r in records("data_parallel") if r.phase == "backward"]
    assert backward[:3] == ["gradient of b3", "gradient of w3", "gradient of b2"]
    assert backward[-1] == "gradient of w0"


def test_every_record_names_what_it_carries():
    def details(strategy, implementation="torch", **changes):
        return [(r.phase, r.detail) for r in records(strategy, implementation, **changes)]

    assert details("tensor_parallel") == [
        *(("forward", f"input of layer {i}") for i in (1, 2, 3)),
        *(("backward", f"gradient of the input of layer {i}") for i in (3, 2, 1)),
        ("forward", "loss"),
    ]
    assert details("megatron_tensor_parallel", problem=Problem(B, D, 6)) == [
        *(("forward", f"output of layer {i}") for i in (1, 3, 5)),
        *(("backward", f"gradient of the input of layer {i}") for i in (4, 2)),
    ]
    assert details("pipeline_parallel", degree=2) == [
        *(("forward", f"activations of tick {i}") for i in (0, 1, 2)),
        *(("backward", f"gradients of tick {i}") for i in (0, 1, 2)),
        ("forward", "loss"),
    ]
    assert details("pipeline_parallel", "annotated") == [
        ("forward", "activations of every tick"),
        ("backward", "gradients of every tick"),
        ("forward", "loss"),
    ]
    assert details("data_parallel", degree=2)[0] == ("forward", "loss")


def test_tensor_parallel_gathers_between_layers_and_scatters_back():
    size = 12 * 8 * 4  # B D e: the total output of a gather, the total input of a scatter
    assert summary(records("tensor_parallel")) == {
        ("all_gather", "forward", "calls"): 3,  # L - 1
        ("all_gather", "forward", "bytes"): 3 * size,
        ("reduce_scatter", "backward", "calls"): 3,
        ("reduce_scatter", "backward", "bytes"): 3 * size,
        ("all_reduce", "forward", "calls"): 1,
        ("all_reduce", "forward", "bytes"): LOSS,
    }


def test_megatron_reduces_once_a_pair_and_its_loss_needs_nothing():
    size = 12 * 8 * 4
    assert summary(records("megatron_tensor_parallel")) == {
        ("all_reduce", "forward", "calls"): 2,  # L / 2
        ("all_reduce", "forward", "bytes"): 2 * size,
        ("all_reduce", "backward", "calls"): 1,  # L / 2 - 1
        ("all_reduce", "backward", "bytes"): size,
    }


def sums_of(gathers: int, scatters: int) -> dict:
    """L = 4 layers of (64 + 8) 4 bytes: w and b of a layer in one call of torch, but what was updated in one each."""
    return {
        ("all_reduce", "forward", "calls"): 1,
        ("all_reduce", "forward", "bytes"): LOSS,
        ("all_gather", "forward" if gathers else "update", "calls"): gathers or 8,
        ("all_gather", "forward" if gathers else "update", "bytes"): 4 * 288,
        ("reduce_scatter", "backward", "calls"): scatters,
        ("reduce_scatter", "backward", "bytes"): scatters * 288,
    }


def test_fully_sharded_gathers_every_layer_and_scatters_every_gradient():
    kept = sums_of(4, 4)
    assert summary(records("fully_sharded", reshard=False)) == kept
    again = {("all_gather", "backward", "calls"): 3, ("all_gather", "backward", "bytes"): 3 * 256}  # w of L - 1 layers
    assert summary(records("fully_sharded")) == kept | again
    assert [r.detail for r in records("fully_sharded") if r.phase == "backward"][:3] == [
        "w3",
        "gradient of w3 and b3",
        "w2",
    ]


def test_in_jax_every_parameter_of_fully_sharded_is_sent_by_itself():
    some = records("fully_sharded", "annotated", reshard=False)
    assert [r.detail for r in some if r.op == "all_gather"][:3] == ["w0", "b0", "w1"]
    assert sum(r.payload_bytes for r in some) == 2 * 4 * 288 + LOSS


def test_zero2_scatters_every_gradient_and_gathers_what_was_updated():
    assert summary(records("zero2")) == sums_of(0, 4)


def test_zero1_reduces_every_gradient_and_gathers_what_was_updated():
    assert summary(records("zero1")) == summary(records("data_parallel")) | {
        ("all_gather", "update", "calls"): 8,
        ("all_gather", "update", "bytes"): 4 * 288,
    }


def test_wire_bytes_of_the_known_answers():
    problem = Problem(256, 1024, 4)
    wires = {
        (name, reshard): totals(records(name, problem=problem, degree=8, reshard=reshard))["wire_bytes"]["max"]
        for name, reshard in (("fully_sharded", False), ("fully_sharded", True), ("zero1", None), ("zero2", None))
    }
    assert wires == {
        ("fully_sharded", False): 29_388_807,
        ("fully_sharded", True): 29_388_807 + 3 * 4_194_304 * 7 // 8,
        ("zero1", None): 44_083_207,
        ("zero2", None): 29_388_807,
    }


@pytest.mark.parametrize("implementation", ["torch", "shard_map"])
def test_pipeline_permutes_in_the_ticks_that_send(implementation):
    size = 4 * 8 * 4  # B / m D e
    assert summary(records("pipeline_parallel", implementation)) == {
        ("collective_permute", "forward", "calls"): 5,  # m + n - 2
        ("collective_permute", "forward", "bytes"): 5 * size,
        ("collective_permute", "backward", "calls"): 5,
        ("collective_permute", "backward", "bytes"): 5 * size,
        ("all_reduce", "forward", "calls"): 1,
        ("all_reduce", "forward", "bytes"): LOSS,
    }


def test_annotated_pipeline_permutes_in_every_tick():
    size = 4 * 8 * 4
    assert summary(records("pipeline_parallel", "annotated")) == {
        ("collective_permute", "forward", "calls"): 6,  # m + n - 1
        ("collective_permute", "forward", "bytes"): 6 * size,
        ("collective_permute", "backward", "calls"): 6,
        ("collective_permute", "backward", "bytes"): 6 * size,
        ("all_reduce", "forward", "calls"): 1,
        ("all_reduce", "forward", "bytes"): LOSS,
    }


def test_the_annotated_pipeline_permutes_along_all_edges_what_the_largest_microbatch_holds():
    forward, backward, _ = records("pipeline_parallel", "annotated", problem=Problem(10, D, L))
    assert forward.edges == ((0, 1), (1, 2), (2, 3)) and backward.edges == ((1, 0), (2, 1), (3, 2))
    for r in (forward, backward):
        assert r.executions == Executions(6, 6)  # exactly m + n - 1
        assert r.payload_bytes == 4 * 8 * 4 and type(r.payload_bytes) is int  # 10 in 3 microbatches: 4, 3, 3


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 6])
def test_every_microbatch_crosses_every_boundary_once_each_way(degree, microbatches):
    some = records("pipeline_parallel", degree=degree, microbatches=microbatches)
    for phase, step in (("forward", 1), ("backward", -1)):
        edges = [edge for r in some if r.op == "collective_permute" and r.phase == phase for edge in r.edges]
        assert all(target - source == step for source, target in edges)
        boundaries = Counter(min(edge) for edge in edges)
        assert boundaries == dict.fromkeys(range(degree - 1), microbatches)


def test_an_uneven_microbatch_counts_with_the_largest_of_its_tick():
    some = records("pipeline_parallel", degree=2, problem=Problem(10, D, L), microbatches=4)
    for phase in ("forward", "backward"):
        rows = [r.payload_bytes // (D * 4) for r in some if r.phase == phase and r.op == "collective_permute"]
        assert rows == [3, 3, 2, 2]
    some = records("pipeline_parallel", degree=3, problem=Problem(10, D, L), microbatches=4)
    for phase in ("forward", "backward"):
        rows = [r.payload_bytes // (D * 4) for r in some if r.phase == phase and r.op == "collective_permute"]
        assert rows == [3, 3, 3, 2, 2]  # in tick 2 one stage sends 3 rows and the other 2


def test_wire_bytes_by_hand_for_four_ranks():
    def wire(strategy):
        return totals(records(strategy))["wire_bytes"]["max"]

    assert wire("data_parallel") == 1.5 * (4 * 72 * 4 + LOSS)  # 2 (n - 1) / n
    assert wire("tensor_parallel") == 0.75 * 6 * 384 + 1.5 * LOSS  # (n - 1) / n
    assert wire("megatron_tensor_parallel") == 1.5 * 3 * 384
    assert wire("pipeline_parallel") == 10 * 128 + 1.5 * LOSS


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_scale_with_the_dtype_and_the_loss_is_in_float32_at_least(implementation, strategy, dtype):
    some = records(strategy, implementation, problem=replace(RUN.problem, dtype=dtype))
    base = records(strategy, implementation)
    for r, r32 in zip(some, base, strict=True):
        if r.detail == "loss":
            assert (r.dtype, r.payload_bytes) == (("float64", 8) if dtype == "float64" else ("float32", 4))
        else:
            assert (r.dtype, r.payload_bytes * 4) == (dtype, r32.payload_bytes * BYTES[dtype])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("strategy", AXES)
def test_one_rank_sends_nothing(implementation, strategy):
    assert records(strategy, implementation, degree=1) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_records_name_axis_group_and_phase(strategy):
    for r in records(strategy):
        assert r.axis == AXES[strategy]
        assert r.phase in ("forward", "backward", *(["update"] if strategy.startswith("zero") else []))
        if r.op == "collective_permute":
            assert r.group_size is None and r.edges
        else:
            assert r.group_size == N and r.groups == ((0, 1, 2, 3),)
