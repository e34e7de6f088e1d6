"""What autograd keeps of a transformer on real ranks is the closed form's to the byte, for every strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contract.axes import parse_axes
from contract.memory import memory, recomputed
from contract.strategy import Run
from contract.transformer import Transformer
from shared_tests import on_ranks

SIZES = Transformer(batch=4, width=16, layers=2, dtype="float64", sequence=8, heads=4, ff=24)
EXPERTS = replace(SIZES, experts=4, capacity_factor=0.8)


def make(mesh: str, *strategies: str, problem: Transformer = SIZES, **rest) -> Run:
    return Run("torch", parse_axes(mesh, strategies), problem, device="cpu", **{"microbatches": 2, **rest})


BF16 = {"problem": replace(SIZES, dtype="bfloat16")}
RUNS = [
    *(make("dp=4", problem=problem) for problem in (SIZES, EXPERTS)),
    make("tp=4"),
    make("tp=4", "sequence_parallel"),
    make("tp=4", "sequence_parallel", problem=EXPERTS),
    make("cp=4", "context_parallel"),
    make("cp=4", "context_parallel", **BF16),
    make("cp=4"),
    make("cp=4", **BF16),
    make("cp=4", "ulysses"),
    make("ep=4", problem=EXPERTS),
    make("ep=4", problem=replace(EXPERTS, dtype="bfloat16")),
    make("fsdp=4"),
    make("fsdp=4", reshard=False),
    make("fsdp=4", "zero2", problem=EXPERTS),
    make("fsdp=2,tp=2", problem=EXPERTS),
    make("fsdp=2,tp=2", "sequence_parallel"),
    make("cp=2,tp=2", "ulysses"),
    make("cp=2,tp=2"),
    make("dp=2,ep=2", problem=EXPERTS),
    make("ep=2,tp=2", problem=EXPERTS),
    make("pp=2,tp=2"),
    make("pp=2,tp=2", "sequence_parallel", schedule="1f1b"),
    make("pp=2,cp=2"),
    make("pp=2,dp=2", schedule="zb_h1", problem=EXPERTS),
    make("pp=2,cp=2", "context_parallel", schedule="zb_h1"),
    *(
        make(mesh, *strategies, recompute=recompute)
        for recompute in ("block", "selective")
        for mesh, *strategies in (("dp=4",), ("tp=4", "sequence_parallel"), ("cp=4",), ("cp=4", "ulysses"), ("fsdp=4",))
    ),
    make("pp=2,tp=2", recompute="block"),
    make("pp=2,cp=2", "context_parallel", recompute="selective"),
]


@pytest.fixture(scope="module")
def measured(pool):
    """run -> what each rank keeps."""
    by_rank = pool.call(on_ranks.passes, RUNS, world_size=4)
    return {run: [told[2] for told in ranks] for run, ranks in zip(RUNS, zip(*by_rank, strict=True), strict=True)}


@pytest.mark.parametrize(
    "run", RUNS, ids=lambda r: f"{r.strategy} {r.mesh} {r.problem.dtype} {r.schedule} {r.recompute} {r.problem.experts}"
)
def test_a_rank_keeps_what_the_closed_form_says_to_the_byte(run, measured):
    assert measured[run] == [held.activations for held in memory(run)]


def test_activations_by_hand():
    """Of a block and a sample: x, its scale, x over its norm and h twice; q, k, v; probabilities; o; the MLP twice."""
    b, d, s, h, f = 4, 16, 8, 4, 24
    block = 2 * (3 * s * d + s) + 4 * s * d + h * s * s + 2 * s * f
    run, first, stream = Run("torch", (), SIZES), s * d + s, s * d  # the batch is no activation
    assert memory(run)[0].activations == 8 * b * (2 * block - first + stream)
    by_block, selective = (replace(run, recompute=recompute) for recompute in ("block", "selective"))
    assert memory(by_block)[0].activations == 8 * b * (stream + stream)  # the second block's input, and the residual
    assert recomputed(by_block, 0) == 8 * b * block
    assert memory(selective)[0].activations == memory(run)[0].activations - 8 * b * 2 * h * s * s
    assert recomputed(selective, 0) == 8 * b * (h * s * s + 3 * s * d) and recomputed(run, 0) == 0


def test_what_is_split_is_kept_in_part():
    """Megatron leaves the stream whole, and sequence_parallel splits it, too (Korthikanti et al., 2205.05198)."""
    whole, tp, sp = (
        memory(Run("torch", axes, SIZES))[0].activations // (8 * 4)
        for axes in ((), parse_axes("tp=4"), parse_axes("tp=4", ("sequence_parallel",)))
    )
    inside, stream, gathered = 2 * (4 * 128 + 256 + 2 * 192), 3 * (128 + 8) + 5 * 128, 4 * 128
    assert whole == inside + stream + gathered
    assert tp == inside // 4 + stream + gathered
    assert sp == inside // 4 + stream // 4 + gathered
