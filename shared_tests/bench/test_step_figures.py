"""How the figures of a training step follow from its seconds: timing, ratios, rates, exposed time. No ranks start."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest

from benchmarks.documents import figures
from benchmarks.steps import numbers as steps_numbers
from contract.axes import one_axis
from contract.problem import Problem
from contract.strategy import Run

SMALL = Problem(batch=8, width=16, layers=4)


def samples(steps_by_name, compute_by_name=None):
    """Samples of two ranks, of which rank 1 takes half as long, in the given rounds."""
    return {
        name: {
            "step": [[each, [s / 2 for s in each]] for each in rounds],
            "compute": [[each, [s / 2 for s in each]] for each in (compute_by_name or {}).get(name, [])],
        }
        for name, rounds in steps_by_name.items()
    }


def test_ratios_are_of_adjacent_iterations_within_a_framework_and_of_rounds_across():
    run = Run("torch", one_axis("data_parallel", 2), SMALL)
    # The machine becomes ten times slower in the second round: no ratio shows it.
    taken = samples({"torch": [[2, 4], [20, 40]], "ddp": [[4, 8], [40, 80]], "annotated": [[1, 1], [10, 10]]})
    found = {(row["of"], row["to"]): row for row in steps_numbers.ratios(run, taken)}
    assert found["torch", "ddp"]["ratio"] == {"median": 0.5, "q1": 0.5, "q3": 0.5}
    assert found["torch", "ddp"]["by"] == "iterations"
    assert found["torch", "annotated"]["ratio"] == {"median": 3, "q1": 3, "q3": 3}
    assert found["torch", "annotated"]["by"] == "rounds"
    assert ("torch", "shard_map") not in found


def test_exposed_communication_is_step_less_compute_for_torch_and_the_profile_s_share_for_jax():
    run = Run("torch", one_axis("data_parallel", 2), SMALL)
    taken = samples({"torch": [[3, 5]], "annotated": [[10, 10]]}, {"torch": [[2, 4]]})
    finished = {
        "annotated": [
            {"loss": 1.0, "difference": 0.0, "profiled": [4.0, 4.0], "exposed": [share, share], "records": []}
            for share in (1.0, 3.0)
        ]
    }
    torch, jax = steps_numbers.rows(run, taken, finished, {})
    assert torch["step_seconds"]["median"] == 4 and torch["exposed_seconds"]["median"] == 1
    assert torch["exposed_share"] == 0.25 and torch["loss"] is None
    assert jax["exposed_share"] == 0.5 and jax["compute_seconds"]["median"] == 5
    assert torch["wire_bytes"] == 2 * 4 * (256 + 16) * 4 // 2 + 4
    assert jax["wire_bytes_compiled"] == 0


def test_a_step_that_takes_longer_without_communication_has_no_exposed_share():
    run = Run("torch", one_axis("data_parallel", 2), SMALL)
    [row] = steps_numbers.rows(run, samples({"torch": [[3, 5]]}, {"torch": [[4, 5]]}), {}, {})
    assert row["exposed_share"] is row["exposed_seconds"] is row["compute_seconds"] is None
    [row] = steps_numbers.rows(run, samples({"torch": [[3, 5]]}, {"torch": [[3, 5]]}), {}, {})
    assert row["exposed_share"] == row["exposed_seconds"]["median"] == 0


def test_a_row_is_of_the_rank_that_differs_most_and_holds_most():
    run = Run("torch", one_axis("data_parallel", 2), SMALL)
    ranks = [
        {"loss": 1.0, "difference": 0.1, "parameters": 10, "gradients": 8},
        {"loss": 1.0, "difference": 0.3, "parameters": 9, "gradients": None},
    ]
    [row] = steps_numbers.rows(run, samples({"torch": [[1]]}), {"torch": ranks}, {"torch": 1e-7})
    assert (row["loss"], row["difference"], row["gradient_difference"]) == (1.0, 0.3, 1e-7)
    want = dict.fromkeys(("optimizer_state", "activations", "temporaries")) | {"parameters": 10, "gradients": 8}
    assert row["memory"]["measured"] == want


def fake(log, name):
    """A contestant of either framework that only records that it ran."""
    act = lambda *_: log.append(name) or SimpleNamespace(item=lambda: 0.0)  # noqa: E731
    return SimpleNamespace(step=act, run=act)


@pytest.fixture
def log(monkeypatch):
    """The calls made while steps are timed, in order; the clock shows how often it was read."""
    from benchmarks.steps import jax as steps_jax
    from benchmarks.steps import torch as steps_torch

    log, readings = [], count()
    clock = SimpleNamespace(perf_counter=lambda: log.append("clock") or float(next(readings)))
    monkeypatch.setattr(steps_torch, "time", clock)
    monkeypatch.setattr(steps_jax, "time", clock)
    monkeypatch.setattr(steps_torch, "dist", SimpleNamespace(barrier=lambda: log.append("barrier")))
    monkeypatch.setattr(steps_torch, "synchronize", lambda device: log.append("done"))
    return log


def timed(order, act):
    """The log of one warm-up and two iterations, every other one in the opposite order."""
    return [
        event
        for iteration in range(3)
        for name in (order[::-1] if iteration % 2 else order)
        for event in (*act(name), *(["clock"] if iteration else []))
    ]


def test_a_step_is_timed_from_a_barrier_to_the_end_on_the_device(log):
    import torch

    from benchmarks.steps import torch as steps_torch

    state = steps_torch.State(torch.device("cpu"))
    state.real |= {"torch": fake(log, "torch"), "ddp": fake(log, "ddp")}
    state.silent |= {"torch": fake(log, "silent")}
    state.batch = None
    taken = steps_torch.block(state, 2, 1)
    assert taken == {"torch": {"step": [1, 1], "compute": [1, 1]}, "ddp": {"step": [1, 1], "compute": []}}
    assert log == timed(["torch", "ddp", "silent"], lambda name: ["barrier", "clock", name, "done"])


def test_a_step_in_jax_is_timed_from_a_barrier_to_its_end(log):
    from benchmarks.steps import jax as steps_jax

    contestants = {name: fake(log, name) for name in ("shard_map", "annotated")}
    state = steps_jax.State(contestants, lambda: log.append("barrier"))
    taken = steps_jax.block(state, 2, 1)
    assert taken == {name: {"step": [1, 1]} for name in contestants}
    assert log == timed(["shard_map", "annotated"], lambda name: ["barrier", "clock", name])


def test_contestants_that_train_otherwise_are_named():
    run = Run("torch", one_axis("data_parallel", 2), SMALL)
    row = {"implementation": "torch", "loss": 1.0, "difference": 0.0, "gradient_difference": 0.0}
    others = [{**row, "implementation": "ddp", "loss": 1.1}, {**row, "difference": float("nan")}]
    others.append({**row, "implementation": "fsdp2", "gradient_difference": 2e-4})  # before anything is timed
    found = steps_numbers.disagreements(run, [row, row, *others])
    assert [sentence.partition(":")[0] for sentence in found] == [
        "ddp data_parallel on 2 ranks",
        "torch data_parallel on 2 ranks",
        "fsdp2 data_parallel on 2 ranks",
    ]


def test_rates_count_the_operations_and_bytes_of_the_passes_and_the_update():
    run = Run("torch", one_axis("single_device", 1), replace(SMALL, layers=2))
    taken = {"matmul": [3.0] * 2, "forward_backward": [5.0] * 2, "update": [7.0] * 2, "copy": [2.0] * 2}
    row = steps_numbers.rates(run, "torch", taken)
    assert row["share"]["median"] == 1  # five products: two forward, two for weights, one for an input
    assert row["update_share"]["median"] == 1  # AdamW moves 7 arrays, a copy 2
    assert row["matmul_flops_per_second"]["median"] == 2 * 8 * 16 * 16


def test_a_collective_is_exposed_where_nothing_computes():
    from benchmarks.profile_jax import Operation, covered, exposed

    ops = [Operation("a", "forward", 0, 10), Operation("c", "communication", 5, 30), Operation("b", "other", 20, 25)]
    assert exposed(ops) == 15
    assert covered([(0, 4), (2, 6), (8, 9), (8, 9)]) == 7
    assert covered([]) == 0


HLO = """
  %param = f32[4]{0} parameter(0)
  %fusion.1 = f32[4]{0} fusion(%param), kind=kLoop, calls=%f, metadata={op_name="jit(step)/jvp(loss)/mul"}
  %dot.2 = (f32[4]{0}, f32[4]{0}) fusion(%param), kind=kLoop, metadata={op_name="jit(step)/transpose(jvp())/dot"}
  ROOT %psum.3 = f32[4]{0} all-reduce(%fusion.1), to_apply=%add
  %start = (f32[4]{0}, f32[4]{0}) collective-permute-start(%fusion.1)
  %while.4 = (s32[], f32[4]{0}) while(%tuple), condition=%c, body=%b
"""


def test_operations_come_with_their_kind_and_on_the_clock_of_the_process():
    from benchmarks import profile_jax

    kinds = profile_jax.kinds(HLO)
    assert kinds["fusion.1"] == "forward" and kinds["dot.2"] == "backward" and kinds["param"] == "other"
    assert kinds["psum.3"] == kinds["start"] == "communication" and "while.4" not in kinds

    def event(name, start, end, *stats):
        return SimpleNamespace(name=name, start_ns=start, end_ns=end, stats=stats)

    line = [
        event(f"{profile_jax.MARK}0", 100, 200),
        event("fusion.1", 110, 120, ("hlo_op", "fusion.1")),
        event("fusion.1", 111, 112),  # without the operation's name: something else
        event("while.4", 120, 180, ("hlo_op", "while.4")),
        event("psum.3", 130, 150, ("hlo_op", "psum.3")),
        event("psum.3", 250, 260, ("hlo_op", "psum.3")),  # after the iteration
    ]
    data = SimpleNamespace(planes=[SimpleNamespace(lines=[SimpleNamespace(events=line)])])
    [(start, end, ops)] = profile_jax.operations(data, kinds, [5100])
    assert (start, end) == (5100, 5200)
    assert [(o.name, o.kind, o.start, o.end) for o in ops] == [
        ("fusion.1", "forward", 5110, 5120),
        ("psum.3", "communication", 5130, 5150),
    ]


def test_spreads_are_medians_and_quartiles():
    assert figures.spread([1, 2, 3, 4, 5]) == {"median": 3, "q1": 2, "q3": 4}
    assert figures.spread([2.0]) == {"median": 2, "q1": 2, "q3": 2}
    assert figures.over_ranks([[1, 5], [2, 3]]) == [2, 5]
