"""`shardiff bench steps`: its arithmetic, the closed form of memory, and that all contestants train the same."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from benchmarks import turns
from benchmarks.documents import figures
from benchmarks.documents.results_io import parse_as
from benchmarks.documents.steps import Steps
from benchmarks.steps import numbers as steps_numbers
from benchmarks.steps import picture, steps, view
from contract.memory import memory
from contract.problem import Problem
from contract.strategy import STRATEGIES, Run, one_axis
from shardiff.system import files
from shared_tests.bench.pools import shared

SMALL = Problem(batch=8, width=16, layers=4)


@pytest.fixture(scope="module", autouse=True)
def ranks(pool):
    with shared(pool):
        yield


def measured_on_rank(device, run, names):
    """finish() of every contestant on one rank, after three steps."""
    from benchmarks.steps import torch as steps_torch

    state = steps_torch.State(device)
    silent = steps_torch.prepare(state, run, names)
    taken = steps_torch.block(state, 2, 1)
    return silent, taken, steps_torch.finish(state)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_peers_train_the_same_and_memory_is_the_closed_form_s(pool, strategy):
    run = Run("torch", one_axis(strategy, 2), SMALL, microbatches=2)
    peers = list(steps_numbers.PEERS[strategy]["torch"])
    ranks = pool.call(measured_on_rank, run, ["torch", *peers], world_size=2)
    for (silent, taken, got), want in zip(ranks, memory(run), strict=True):
        for name in ("torch", *peers):
            assert got[name]["difference"] < 1e-4, name
            assert got[name]["loss"] == pytest.approx(got["torch"]["loss"], rel=1e-4), name
            assert len(taken[name]["step"]) == 2
            assert len(taken[name]["compute"]) == (2 if name in silent else 0)
        assert "torch" in silent
        ours = got["torch"]
        assert ours["parameters"] == want.parameters
        loss = 4 if strategy == "data_parallel" else 0  # it rides in a bucket of gradients
        assert ours["gradients"] == want.gradients + loss
        assert want.optimizer_state <= ours["optimizer_state"] <= want.optimizer_state + 4 * 2 * SMALL.layers
        assert ours["activations"] == want.activations


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
    torch, jax = steps_numbers.rows(run, taken, finished)
    assert torch["step_seconds"]["median"] == 4 and torch["exposed_seconds"]["median"] == 1
    assert torch["exposed_share"] == 0.25 and torch["loss"] is None
    assert jax["exposed_share"] == 0.5 and jax["compute_seconds"]["median"] == 5
    assert torch["wire_bytes"] == 2 * 4 * (256 + 16) * 4 // 2 + 4
    assert jax["wire_bytes_compiled"] == 0


def test_a_row_is_of_the_rank_that_differs_most_and_holds_most():
    run = Run("torch", one_axis("data_parallel", 2), SMALL)
    ranks = [
        {"loss": 1.0, "difference": 0.1, "parameters": 10, "gradients": 8},
        {"loss": 1.0, "difference": 0.3, "parameters": 9, "gradients": None},
    ]
    [row] = steps_numbers.rows(run, samples({"torch": [[1]]}), {"torch": ranks})
    assert (row["loss"], row["difference"]) == (1.0, 0.3)
    want = dict.fromkeys(("optimizer_state", "activations", "temporaries")) | {"parameters": 10, "gradients": 8}
    assert row["memory"]["measured"] == want


def fake(log, name):
    """A contestant of one of both frameworks that only tells that it ran."""
    act = lambda *_: log.append(name) or SimpleNamespace(item=lambda: 0.0)  # noqa: E731
    return SimpleNamespace(step=act, run=act)


@pytest.fixture
def log(monkeypatch):
    """What is called in which order while steps are timed; the clock shows how often it was read."""
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


def test_results_come_by_rank_whoever_answers_first(monkeypatch):
    pairs = [Pipe() for _ in range(3)]
    for rank, (_, peer) in enumerate(pairs):
        peer.send(rank)
    monkeypatch.setattr(turns, "wait", lambda connections, timeout: [connections[-1]])  # the last rank first
    ranks = turns.Ranks([connection for connection, _ in pairs], Future())
    assert ranks.call("name", 1, 2) == [0, 1, 2]
    assert [peer.recv() for _, peer in pairs] == [("name", (1, 2))] * 3
    for connection in (connection for pair in pairs for connection in pair):
        connection.close()


def test_contestants_that_train_otherwise_are_named():
    run = Run("torch", one_axis("data_parallel", 2), SMALL)
    row = {"implementation": "torch", "loss": 1.0, "difference": 0.0}
    others = [{"implementation": "ddp", "loss": 1.1, "difference": 0.0}, {**row, "difference": float("nan")}]
    found = steps_numbers.disagreements(run, [row, row, *others])
    assert [sentence.partition(":")[0] for sentence in found] == [
        "ddp data_parallel on 2 ranks",
        "torch data_parallel on 2 ranks",
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


def test_a_document_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results.json"
    files.write(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        files.write(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_spreads_are_medians_and_quartiles():
    assert figures.spread([1, 2, 3, 4, 5]) == {"median": 3, "q1": 2, "q3": 4}
    assert figures.spread([2.0]) == {"median": 2, "q1": 2, "q3": 2}
    assert figures.over_ranks([[1, 5], [2, 3]]) == [2, 5]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--speed-batch", "0"], "speed-batch must be at least 1, got 0"),
        (["--iterations", "0"], "iterations must be at least 1, got 0"),
        (["--iterations", "2", "--rounds", "3"], "2 iterations cannot be split into 3 rounds"),
        (["--implementation", "tensorflow"], "unknown implementation 'tensorflow'"),
        (["--ranks", "3", "--strategy", "tensor_parallel"], "width 1024, degree 3"),
        (["--batch", "10"], "batch 10, microbatches 4"),
        (["--timeout", "nan"], "timeout must be a number of seconds"),
        (["--output", "no/such/folder/a.json"], "the output must be a .json file"),
        (["--picture", "a.jpg"], "the picture must be a .png file"),
    ],
)
def test_wrong_input_is_refused_in_a_line_before_anything_starts(arguments, reason, capsys):
    from benchmarks.commands import bench

    with pytest.raises(SystemExit) as ended:
        bench(["steps", *arguments])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert reason in told and told.count("\n") == 1


def test_one_run_of_everything_and_what_it_shows(tmp_path):
    from rich.console import Console

    plan = steps.plan(
        [2], ["single_device", "tensor_parallel"], steps.IMPLEMENTATIONS, SMALL, iterations=2, rounds=2,
        device="cpu", timeout=100, speed_batch=16,
    )  # fmt: skip
    saved = []
    document = steps.measure(plan, lambda so_far: saved.append(json.dumps(so_far, allow_nan=False)))
    assert document["failures"] == [] and document["complete"]
    assert json.loads(saved[-1]) == document
    assert [json.loads(each)["complete"] for each in saved] == [False] * (len(saved) - 1) + [True]
    assert any(not json.loads(each)["rows"][0]["loss"] for each in saved), "saved before the strategy was finished"

    rows = {(row["ranks"], row["implementation"]): row for row in document["rows"]}
    assert set(rows) == {(1, name) for name in ("torch", "modules", "shard_map", "annotated", "jit")} | {
        (2, name) for name in ("torch", "dtensor", "shard_map", "annotated")
    }
    for row in rows.values():
        assert row["exposed_share"] is not None, row["implementation"]
        assert len(row["samples_seconds"]) == 2
        for kind in ("parameters", "gradients", "optimizer_state"):
            held, formula = row["memory"]["measured"][kind], row["memory"]["closed_form"][kind]
            assert held == pytest.approx(formula, rel=0.1), (row["implementation"], kind)
    assert rows[2, "annotated"]["wire_bytes_compiled"] >= rows[2, "annotated"]["wire_bytes"] > 0
    pairs = {(row["ranks"], row["of"], row["to"]) for row in document["ratios"]}
    assert {(2, "torch", "dtensor"), (2, "shard_map", "annotated"), (1, "annotated", "jit")} <= pairs
    assert [row["framework"] for row in document["single_device"]] == ["torch", "jax"]

    result = parse_as(Steps, document)
    picture.picture(result, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 10_000
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    for part in view.parts(result):
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
    text = console.export_text()
    console.file.close()
    assert "tensor_parallel" in text and "dtensor" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_failing_rank_is_told_in_its_own_words():
    with pytest.raises(
        RuntimeError, match="rank 0 of 1 raised in phase block.*\n.*(?s:.)*unsupported operand"
    ) as failed:
        with turns.ranks("torch", 1, "benchmarks.steps.torch", "cpu", 60) as ranks:
            assert ranks.call("block", 1, 0) == [{}]
            ranks.call("block", None, 0)
    assert type(failed.value).__name__ == "WorkerError" and "unsupported operand" in str(failed.value)
