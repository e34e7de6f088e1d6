"""One GPT in torch and in flax nnx: a diff of the two says what a person wants to know, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import shardiff
from shardiff.diff import Diff
from shardiff.program import Program
from shardiff.ranks.supervisor import Workers
from shardiff.tracing.merge import program_of
from shared_tests.tool.pairs import gpt_nnx, gpt_torch
from shared_tests.tool.pairs.sizes import BATCH, LAYERS, RANKS, TOKENS, VOCABULARY, D

AXES = {"data_parallel": "dp", "fully_sharded": "dp", "tensor_parallel": "tp"}
FLOAT = 4
BLOCK = 4 * (D * D + D) + (4 * D * D + 4 * D) + (4 * D * D + D) + 4 * D
PARAMETERS = (2 * VOCABULARY * D + TOKENS * D + LAYERS * BLOCK + 2 * D) * FLOAT
ACTIVATIONS = BATCH * TOKENS * D * FLOAT


@pytest.fixture(scope="module")
def traced(pool: Workers) -> dict[str, Program]:
    """The last training step of each program in torch."""
    ranks = pool.call(gpt_torch.traced, tuple(AXES), world_size=RANKS)
    return {name: program_of([rank[name] for rank in ranks], "torch").steps[-1] for name in AXES}


@cache
def compiled(name: str) -> Program:
    step, args = gpt_nnx.step(shardiff.mesh(f"cpu:{RANKS}", **{AXES[name]: RANKS}), name)
    return shardiff.read(step.lower(*args).compile())


def told(diff: Diff) -> list[tuple[str, tuple[str, ...], dict[str, int]]]:
    return [(row.verdict, row.rules, row.bytes) for row in diff.rows]


def test_ddp_and_data_parallel_send_the_same_gradients_and_one_the_whole_loss_too(traced: dict[str, Program]) -> None:
    diff = shardiff.diff(traced["data_parallel"], compiled("data_parallel"))
    gradients = PARAMETERS * 2 * (RANKS - 1) // RANKS
    loss = FLOAT * 2 * (RANKS - 1) // RANKS
    assert told(diff) == [("rewritten", ("global_value",), {"left": gradients, "right": gradients + loss})]
    assert diff.unexplained == 0


def test_fsdp2_and_nnx_gather_the_same_weights_and_each_difference_has_a_name(traced: dict[str, Program]) -> None:
    """FSDP2 gathers twice; XLA once, keeps the weights, and on a CPU sums each gradient whole. Each rank looks up its
    columns of the embedding for all samples, and these are exchanged, where FSDP2 gathers the table. The loss of all
    samples is in JAX's alone."""
    left, right = traced["fully_sharded"], compiled("fully_sharded")
    diff = shardiff.diff(left, right)
    assert diff.unexplained == 0, diff
    rules = {rule for row in diff.rows for rule in row.rules}
    assert rules == {"unfused_reduce_scatter", "kept", "weight_gathered", "resharded", "global_value"}
    for side, program in (("left", left), ("right", right)):
        assert sum(row.bytes[side] for row in diff.rows) == program.wire_bytes
    gathers = left.only("all_gather", phase="forward").payload_bytes
    assert gathers == left.only("reduce_scatter").payload_bytes == PARAMETERS
    weights = right.only("all_gather", phase="forward", moves="parameter").payload_bytes
    table, place, unsplit = (n * FLOAT for n in (VOCABULARY * D, TOKENS * D, LAYERS * (3 * D + 4 * D)))
    assert weights == PARAMETERS - table - place - unsplit  # biases of q, k, v and up have no dim that is split


def test_a_gradient_that_fsdp2_forgets_is_unexplained(traced: dict[str, Program]) -> None:
    left = traced["fully_sharded"]
    for forgotten in left.only("reduce_scatter").records:
        without = replace(left, records=tuple(record for record in left.records if record != forgotten))
        assert shardiff.diff(without, compiled("fully_sharded")).unexplained == 1, forgotten.detail


def test_parallelize_module_and_annotations_send_the_same_sums(traced: dict[str, Program]) -> None:
    diff = shardiff.diff(traced["tensor_parallel"], compiled("tensor_parallel"))
    sums = ACTIVATIONS * 2 * (RANKS - 1) // RANKS
    rows = [(row.verdict, row.rules) for row in diff.rows]
    assert set(rows) == {("same", ()), ("rewritten", ("combined",))}, diff
    for side in ("left", "right"):
        by_phase = {"forward": 2 * LAYERS * sums, "backward": 4 * LAYERS * sums}
        sent = {phase: getattr(diff, side).only(phase=phase).wire_bytes for phase in by_phase}
        assert sent == by_phase and sum(row.bytes[side] for row in diff.rows) == sum(by_phase.values())


def test_a_sum_that_one_of_them_forgets_is_unexplained(traced: dict[str, Program]) -> None:
    left = traced["tensor_parallel"]
    forward = left.only(phase="forward").records
    without = replace(left, records=tuple(record for record in left.records if record != forward[0]))
    assert shardiff.diff(without, compiled("tensor_parallel")).unexplained == 1
