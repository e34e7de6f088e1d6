"""The known answers: what the spellings of a transformer's strategies send. `make long` compiles all of the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contract import cost
from contract.strategy import Run
from shardiff.compiling.hardware import has_compiler, parse
from shardiff.record import step_bytes
from shared_tests.proof.spellings import AXES, SPELLINGS, figures, run_of, sent

FIGURES = figures()
KNOWN = {  # by programs that were written for this alone, and checked by hand
    ("megatron_tensor_parallel", "annotated", "h100:8"): 469_762_048,
    ("megatron_tensor_parallel", "naive", "cpu:8"): 704_643_072,
    ("sequence_parallel", "annotated", "h100:8"): 469_790_727,
    ("sequence_parallel", "annotated", "cpu:8"): 939_552_775,
    ("sequence_parallel", "naive", "cpu:8"): 616_591_367,
    ("sequence_parallel", "naive", "h100:8"): 411_070_471,
    ("context_parallel", "annotated", "cpu:8"): 528_510_983,
    ("context_parallel", "annotated", "h100:8"): 411_070_471,
    ("ring_attention", "torch", ""): 545_288_199,
    ("ring_attention", "shard_map", "h100:8"): 411_070_471,
    ("ulysses", "annotated", "cpu:8"): 234_909_703,
    # Experts alone, in two layers: 51,494,919. Beside them blocks have attention and gains, whose gradients are summed,
    # and the input of the first experts has a gradient, which travels too.
    ("expert_parallel", "annotated", "h100:8"): 51_494_919 + 58_720_256 + 28_672 + 7_340_032,
}
IN_THE_SUITE = [
    ("megatron_tensor_parallel", "naive", "cpu:8"),
    ("sequence_parallel", "annotated", "cpu:8"),
    ("context_parallel", "annotated", "cpu:8"),
    ("expert_parallel", "naive", "cpu:8"),
]


def test_the_page_has_the_known_answers_and_every_spelling():
    assert KNOWN.items() <= FIGURES.items()
    assert {strategy for strategy, _, _ in FIGURES} == set(AXES)


@pytest.mark.parametrize("strategy", AXES)
def test_what_the_page_says_is_written_is_the_closed_form(strategy):
    told = {spelling: bytes for (name, spelling, target), bytes in FIGURES.items() if name == strategy and not target}
    for spelling, want in told.items():
        run = run_of(strategy, spelling)
        form = cost.communication(run if spelling == "shard_map" else run.in_torch)
        assert step_bytes(form) == want, spelling


@pytest.mark.parametrize(("strategy", "spelling", "target"), IN_THE_SUITE)
def test_what_is_compiled_has_the_bytes_of_the_page_and_every_difference_a_rule(strategy, spelling, target):
    if not has_compiler(parse(target).kind):
        pytest.skip(f"the compiler for {target} is not installed; extra: compilers")
    assert sent(run_of(strategy, spelling), target) == (FIGURES[strategy, spelling, target], 0)


def test_recompute_of_blocks_adds_one_sum_a_block():
    """Megatron's blocks at 8 ranks: 2 all_reduces of 33.5 MB more, one for each block and not two."""
    run = replace(run_of("megatron_tensor_parallel", "torch"), recompute="block")
    assert step_bytes(cost.communication(run)) == 587_202_560


@pytest.mark.parametrize("strategy", [name for name in AXES if name not in ("ring_attention",)])
def test_a_naive_spelling_is_refused_where_there_is_none(strategy):
    if strategy in ("context_parallel", "ulysses"):
        with pytest.raises(ValueError, match="have a naive spelling, and only under annotations"):
            run_of(strategy, "naive")
    else:
        assert isinstance(run_of(strategy, "naive"), Run) and "naive" in SPELLINGS
