"""The library equivalents in torch train the same as ours, and what ours hold is what the closed form says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.steps import torch_ring
from benchmarks.steps.numbers import peers_of
from contract.axes import parse_axes
from contract.memory import memory
from contract.problem import Problem
from contract.strategy import Run
from contract.transformer import Transformer
from shared_tests.bench.pools import shared
from shared_tests.evidence import each

BEFORE_FORK = ("benchmarks.steps.torch", "benchmarks.steps.zero", "torch._dynamo")
SMALL = Problem(batch=8, width=16, layers=4, dtype="float64")
BLOCKS = Transformer(batch=4, width=16, layers=2, dtype="float64", sequence=16, heads=4, ff=24)
EXPERTS = replace(BLOCKS, experts=4, capacity_factor=0.75)  # with which some tokens are dropped


def run_of(mesh: str, *strategies: str, reshard: bool | None = None, problem: Problem = SMALL) -> Run:
    return Run("torch", parse_axes(mesh, strategies), problem, microbatches=2, device="cpu", reshard=reshard)


PEERS = {  # on 4 ranks: every axis alone, and every two that torch composes
    run_of("dp=4"): ("ddp", "fsdp2"),
    run_of("tp=4"): ("dtensor",),
    run_of("tp=4", "tensor_parallel"): ("dtensor",),
    run_of("pp=4"): ("pipelining",),
    run_of("fsdp=4"): ("fsdp2",),
    run_of("fsdp=4", reshard=False): ("fsdp2",),
    run_of("fsdp=4", "zero1"): ("ddp_zero",),
    run_of("fsdp=4", "zero2"): ("fsdp2",),
    run_of("dp=2,fsdp=2"): ("fsdp2",),
    run_of("dp=2,tp=2"): ("dtensor_ddp",),
    run_of("dp=2,tp=2", "tensor_parallel"): ("dtensor_ddp",),
    run_of("fsdp=2,tp=2"): ("dtensor_fsdp2",),
    run_of("fsdp=2,tp=2", "tensor_parallel", reshard=False): ("dtensor_fsdp2",),
    run_of("tp=2,fsdp=2"): (),  # torch wants tp inside
    run_of("dp=4", problem=EXPERTS): ("ddp", "fsdp2"),
    run_of("fsdp=4", problem=BLOCKS): ("fsdp2",),
    run_of("tp=4", problem=BLOCKS): ("dtensor",),
    run_of("tp=4", "sequence_parallel", problem=BLOCKS): ("dtensor",),
    run_of("cp=4", problem=BLOCKS): ("ddp_ring",),
    run_of("ep=4", problem=EXPERTS): ("all_to_all",),
    run_of("pp=4", problem=replace(BLOCKS, layers=4)): ("pipelining",),
    run_of("fsdp=2,tp=2", "sequence_parallel", problem=BLOCKS): ("dtensor_fsdp2",),
}


LONG = [run for run in PEERS if "tensor_parallel" in run.strategies or run.reshard is False]


def measured_on_rank(device, runs):
    """For each run, what prove(), block() and finish() of every contestant say on one rank, after four steps."""
    from benchmarks.steps import torch as steps_torch

    state, results = steps_torch.State(device), []
    for run in runs:
        assert steps_torch.prepare(state, run, ["torch", *peers_of(run, "torch")]) == {}
        proof, taken = steps_torch.prove(state), steps_torch.block(state, 2, 1)
        results.append((list(state.silent), proof, taken, steps_torch.finish(state)))
    return results


@pytest.fixture(scope="module")
def measured(pool, request):
    """run -> what every rank tells; only of the runs that the session's tests take."""
    chosen = {item.callspec.params.get("run") for item in request.session.items if hasattr(item, "callspec")}
    runs = [run for run in PEERS if run in chosen]
    with shared(pool):
        ranks = pool.call(measured_on_rank, runs, world_size=4)
    return dict(zip(runs, zip(*ranks, strict=True), strict=True))


def label(run: Run) -> str:
    kind = "" if run.problem is SMALL else ", experts" if getattr(run.problem, "experts", 0) else ", blocks"
    return f"{run.strategy}{'' if run.gathered_again else ', kept'}{kind}"


@each([*PEERS], LONG, label)
def test_peers_train_the_same(run, measured):
    assert peers_of(run, "torch") == PEERS[run]
    for silent, proof, taken, got in measured[run]:
        assert set(got) == {"torch", *PEERS[run]} and "torch" in silent
        for name, told in got.items():
            assert proof[name] < 1e-12, name
            assert told["difference"] < 1e-12, name
            assert told["loss"] == pytest.approx(got["torch"]["loss"], rel=1e-12), name
            assert len(taken[name]["step"]) == 2
            assert len(taken[name]["compute"]) == (2 if name in silent else 0)


@each([*PEERS], LONG, label)
def test_memory_is_the_closed_form_s(run, measured):
    tensors = sum(map(len, run.problem.shapes()))
    for (*_, got), want in zip(measured[run], memory(run), strict=True):
        ours = got["torch"]
        assert ours["parameters"] == want.parameters
        replicated = {"data_parallel", "zero1", "ring_attention"} & {*run.strategies}
        in_buckets = replicated and "fully_sharded" not in run.strategies
        assert ours["gradients"] == want.gradients + (8 if in_buckets else 0)  # the loss rides in one
        assert want.optimizer_state <= ours["optimizer_state"] <= want.optimizer_state + 4 * tensors
        assert ours["activations"] == want.activations


@each([run for run in PEERS if "fsdp" in run.mesh.names], LONG, label)
def test_what_fsdp2_and_zero_hold_is_the_closed_form_s_as_well(run, measured):
    for (*_, got), want in zip(measured[run], memory(run), strict=True):
        for theirs in (got[name] for name in PEERS[run]):
            if "zero2" not in run.strategies:  # beside which FSDP2 is for context
                assert theirs["parameters"] == want.parameters
            assert theirs["gradients"] == want.gradients
            assert theirs["optimizer_state"] == pytest.approx(want.optimizer_state, rel=0.02)


def test_another_order_of_the_axes_or_a_naive_pipeline_has_no_peer():
    assert peers_of(run_of("tp=2,dp=2"), "torch") == ()
    assert peers_of(replace(run_of("pp=4"), schedule="naive"), "torch") == ()
    assert peers_of(run_of("fsdp=4"), "jax") == ()
    assert peers_of(run_of("tp=4", problem=EXPERTS), "torch") == ()  # DTensor has no style for experts
    assert peers_of(replace(run_of("dp=4", problem=BLOCKS), recompute="block"), "torch") == ()


def test_a_torch_without_the_private_ring_leaves_it_out_and_says_why(monkeypatch):
    monkeypatch.setattr(torch_ring, "MODULE", "torch.distributed.no_such_module")
    with pytest.raises(torch_ring.NotThere, match="no such private ring attention: No module named"):
        torch_ring.ring_attention(None, "float32")
