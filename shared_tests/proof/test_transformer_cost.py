"""A transformer's closed form of communication: what blocks that are run again send, and what JAX compiles to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from contract import cost
from contract.axes import parse_axes
from contract.strategy import Run
from contract.transformer import Transformer
from jax_impl.compiled import compile_all
from shardiff import hlo
from shardiff.compiling.hardware import parse
from shardiff.diff.rows import align, unexplained
from shared_tests.evidence import told
from shared_tests.on_ranks import traced

SIZES = Transformer(batch=4, width=16, layers=2, dtype="float64", sequence=8, heads=4, ff=24)
EXPERTS = replace(SIZES, experts=4)


def make(mesh: str, *strategies: str, problem: Transformer = SIZES, **rest) -> Run:
    rest = {"microbatches": 2, "device": "cpu", "overlap": False, **rest}
    return Run("torch", parse_axes(mesh, strategies), problem, **rest)


RUNS = [
    *(make("tp=4", problem=problem) for problem in (SIZES, EXPERTS)),
    *(make("tp=4", "sequence_parallel", problem=problem) for problem in (SIZES, EXPERTS)),
    *(make("cp=4", name) for name in ("context_parallel", "ring_attention", "ulysses")),
    make("ep=4", problem=EXPERTS),
    make("dp=2,ep=2", problem=EXPERTS),
    make("cp=2,tp=2", "ulysses"),
    make("fsdp=2,tp=2", "sequence_parallel"),
    make("pp=2,tp=2", "sequence_parallel"),
]
AGAIN = [
    make(mesh, *strategies, recompute="block", problem=EXPERTS if "ep" in mesh else SIZES)
    for mesh, *strategies in (
        ("tp=4",),
        ("tp=4", "sequence_parallel"),
        ("cp=4",),
        ("cp=4", "ulysses"),
        ("ep=4",),
        ("fsdp=4",),
        ("fsdp=2,tp=2",),
        ("pp=2,tp=2",),
    )
]


def label(run: Run) -> str:
    return f"{run.strategy} {run.mesh} {run.problem.experts} {run.recompute}"


@pytest.fixture(scope="module")
def traced_runs(pool):
    return traced(AGAIN, pool)


@pytest.mark.parametrize("run", AGAIN, ids=label)
def test_torch_sends_what_the_closed_form_says_record_by_record(run, traced_runs):
    assert told(traced_runs[run]) == told(cost.communication(run))


def test_a_block_that_is_run_again_adds_one_sum_and_not_two():
    run = make("tp=4")
    twice, once = (cost.communication(replace(run, recompute=name)) for name in ("block", "none"))
    added = Counter((r.op, r.phase, r.detail) for r in twice) - Counter((r.op, r.phase, r.detail) for r in once)
    assert added == {("all_reduce", "backward", f"output of layer {i}"): 1 for i in (0, 2)}


def test_attention_that_is_run_again_sends_nothing():
    for name in ("context_parallel", "ring_attention", "ulysses"):
        run = make("cp=4", name)
        assert cost.communication(replace(run, recompute="selective")) == cost.communication(run)


def compiled(runs):
    """(run, the records of the program that is compiled for CPUs) of runs with one block."""
    runs = [replace(run, problem=replace(run.problem, layers=1)) for run in runs if "pp" not in run.mesh.names]
    for run, program in zip(runs, compile_all([(run, parse(f"cpu:{run.world_size}")) for run in runs]), strict=True):
        yield run, run.mesh.named(hlo.read(program.hlo).records)


@pytest.mark.parametrize("chosen", [slice(None, None, 2), pytest.param(slice(1, None, 2), marks=pytest.mark.long)])
def test_shard_map_compiles_to_the_predicted_bytes_of_each_axis_exactly(chosen):
    for run, records in compiled([replace(run, implementation="shard_map", reshard=False) for run in RUNS[chosen]]):
        found, want = Counter(), Counter()
        for sums, some in ((found, records), (want, cost.communication(run))):
            for r in some:
                sums[r.op, r.phase, r.axis] += r.payload_bytes * (r.executions.max or 0)
        loss = {key: value for key, value in (found - want).items() if value <= 8}  # it may ride with the gradients
        assert {k: v for k, v in (found - want).items() if k not in loss} == {}, label(run)
        assert sum(found.values()) == sum(want.values()), label(run)
        assert unexplained(align(cost.communication(run.in_torch), records)) == 0, label(run)


def test_every_difference_of_annotated_code_is_under_a_rule():
    runs = [run for run in RUNS if "ring_attention" not in run.strategies]  # which no annotation derives
    for run, records in compiled([replace(run, implementation="annotated") for run in runs]):
        rows = align(cost.communication(run.in_torch), records)
        assert [row.why for row in rows if row.unexplained] == [], label(run)
