"""Blocks that are run again train as blocks whose activations are stored: bit for bit in torch, to rounding in JAX."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from contract import proof
from contract.axes import parse_axes
from contract.strategy import Run
from contract.transformer import Transformer
from shared_tests import evidence
from shared_tests.evidence import each
from shared_tests.on_ranks import losses_and_gradients_stored_elsewhere

MLP = Transformer(batch=4, width=16, layers=2, dtype="float64", sequence=8, heads=4, ff=24)
MOE = replace(MLP, experts=4)
AGAIN = ("block", "selective")
IN_TORCH = [
    ("dp=2", (), MLP),
    ("tp=2", (), MOE),
    ("tp=2", ("sequence_parallel",), MLP),
    ("fsdp=2", (), MLP),
    ("fsdp=2", ("zero2",), MLP),
    ("cp=2", ("context_parallel",), MLP),
    ("cp=2", ("ring_attention",), MLP),
    ("cp=2", ("ulysses",), MLP),
    ("ep=2", (), MOE),
    ("pp=2", (), MLP),
    ("fsdp=2,tp=2", (), MOE),
]
IN_JAX = [  # side, mesh, strategies, problem
    ("shard_map", "tp=2", ("sequence_parallel",), MLP),
    ("annotated", "fsdp=2", (), MLP),
    ("shard_map", "cp=2", ("ring_attention",), MLP),
    ("shard_map", "pp=2", (), MLP),
    ("annotated", "ep=2", (), MOE),
    ("annotated", "cp=2", ("ulysses",), MLP),
]


def make(side: str, mesh: str, strategies: tuple[str, ...], problem: Transformer, recompute: str) -> Run:
    return Run(side, parse_axes(mesh, strategies), problem, steps=1, microbatches=2, device="cpu", recompute=recompute)


IN_TORCH = [make("torch", *case, recompute) for case in IN_TORCH for recompute in AGAIN]
IN_JAX = [make(*case, AGAIN[i % 2]) for i, case in enumerate(IN_JAX)]


def label(run: Run) -> str:
    return f"{run.implementation}-{run.strategy}-{run.recompute}"


@each(IN_TORCH, ids=label)
def test_in_torch_no_bit_changes_and_all_is_the_reference_s(run, execute, reference_of):
    assert evidence.failures(run, execute(run), reference_of(replace(run, recompute="none"))) == []
    assert evidence.different(execute(run), execute(replace(run, recompute="none"))) == []


@each([run for run in IN_TORCH if run.recompute == "selective"], ids=label)
def test_what_is_kept_may_be_stored_in_the_host_s_memory(run, pool):
    """Autograd's hooks of others compose with ours, which gather weights again and keep scores for another pass."""
    ranks = pool.call(losses_and_gradients_stored_elsewhere, replace(run, recompute="none"), world_size=run.world_size)
    for (loss, grads), (other_loss, others) in ranks:
        assert loss == other_loss and all(map(np.array_equal, grads, others))


@each(IN_JAX, IN_JAX[2:], ids=label)
def test_in_jax_it_is_the_same_to_rounding_and_all_is_the_reference_s(run, execute, reference_of):
    """XLA compiles another program, in which it fuses products and sums elsewhere: some last bits differ."""
    stored = execute(replace(run, recompute="none"))
    assert evidence.failures(run, execute(run), reference_of(replace(run, recompute="none"))) == []
    assert max(proof.distances(execute(run), stored).values()) < 1e-14
