"""Small programs from public reports of bugs, each with its right answer: what the trace and the diff say of them."""

from __future__ import annotations

from typing import Any

import pytest

import shardiff
from shardiff.program import Program
from shardiff.ranks.supervisor import Workers
from shardiff.tracing.merge import disagreements, program_of
from shared_tests.tool import situations

COMBINED = """HloModule step, num_partitions=4
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
ENTRY %main (x: f32[64], y: f32[64], z: f32[64]) -> (f32[64], f32[64], f32[64]) {
  %x = f32[64]{0} parameter(0)
  %y = f32[64]{0} parameter(1)
  %z = f32[64]{0} parameter(2)
  ROOT %r = (f32[64]{0}, f32[64]{0}, f32[64]{0}) all-reduce(%x, %y, %z), channel_id=1, replica_groups={{0,1,2,3}},
    use_global_device_ids=true, to_apply=%sum, metadata={op_name="jit(step)/transpose(jvp())/dot_general"}
}
"""


@pytest.fixture(scope="module")
def ranks(pool: Workers) -> dict[str, list[list[Any]]]:
    """The calls of every situation, by rank."""
    found = {}
    for size, names in ((4, situations.OF_FOUR), (2, situations.OF_TWO)):
        of_ranks = pool.call(situations.traced, world_size=size)
        found |= {name: [rank[name] for rank in of_ranks] for name in names}
    return found


@pytest.fixture
def programs(ranks: dict[str, list[list[Any]]]) -> dict[str, Program]:
    return {name: program_of(calls, name) for name, calls in ranks.items()}


def test_a_sum_over_the_wrong_group_is_unexplained(programs: dict[str, Program]) -> None:
    diff = shardiff.diff(programs["tokens over cp"], programs["tokens over tp"])
    [row] = diff.rows
    assert row.rules == ("other_ranks",) and diff.unexplained == 1
    assert [(r.groups, r.axis) for r in (*row.left, *row.right)] == [
        (((0, 2), (1, 3)), "cp"),
        (((0, 1), (2, 3)), "tp"),
    ]


def test_another_reduction_or_root_is_neither_the_same_nor_explained(programs: dict[str, Program]) -> None:
    diff = shardiff.diff(programs["sum, root 0"], programs["max, root 1"])
    assert [row.verdict for row in diff.rows] == ["only left"] * 2 + ["only right"] * 2
    assert [r.reduction or r.root for row in diff.rows for r in (*row.left, *row.right)] == ["sum", 0, "max", 1]
    averaged = shardiff.diff(programs["sum, root 0"], programs["avg, root 0"])
    assert [row.rules for row in averaged.rows] == [("averaged",), ()]


def test_a_gradient_that_is_reduced_twice_is_one_call_too_many(programs: dict[str, Program]) -> None:
    diff = shardiff.diff(programs["one copy"], programs["two copies"])
    assert [row.verdict for row in diff.rows] == ["same", "same", "only right"]
    [extra] = diff.rows[-1].right
    assert (extra.op, extra.phase, extra.payload_bytes, extra.times) == ("all_reduce", "backward", 256, 1)
    assert sum(row.bytes["right"] for row in diff.rows) == diff.right.wire_bytes == 768


def test_three_calls_of_one_line_are_combined_and_no_loop(programs: dict[str, Program]) -> None:
    diff = shardiff.diff(programs["three calls"], shardiff.read(COMBINED))
    [row] = diff.rows
    assert row.rules == ("combined",) and row.bytes == {"left": 1152, "right": 1152}


def test_the_parameters_of_two_models_are_told_apart(programs: dict[str, Program]) -> None:
    names = [f"gradient of {net}.0.{p}" for net in ("actor", "critic") for p in ("weight", "bias")]
    assert [record.detail for record in programs["two models"]] == names


def test_every_call_from_threads_of_cpp_is_seen_on_every_rank(ranks: dict[str, list[list[Any]]]) -> None:
    """Two steps reduce the bucket whole; each of the two after them reduces the biases, and two factors of the rest."""
    calls = ranks["powersgd"]
    assert disagreements(calls) == []
    for each in calls:
        trained = [call for call in each if call.op == "all_reduce"]
        assert len(trained) == 2 + 2 * 3 and {call.phase for call in trained} == {"backward"}
