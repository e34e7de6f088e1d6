"""What the pages say of the MLP's training steps is what its generator makes of the results."""

from __future__ import annotations

from types import SimpleNamespace as Made

import pytest

from benchmarks.report import training_steps


@pytest.mark.parametrize("path", training_steps.PAGES, ids=lambda path: path.name)
def test_the_part_of_the_page_is_made_of_the_results(path):
    page = path.read_text(encoding="utf-8")
    assert training_steps.BEGIN in page and training_steps.END in page
    assert training_steps.replaced(page) == page


def test_a_strategy_that_takes_longer_than_its_library_equivalent_is_named():
    def ratio(strategy: str, to: str, median: float) -> Made:
        return Made(strategy=strategy, ranks=2, on="2 ranks", of="torch", to=to, ratio=Made(median=median))

    ratios = [ratio("data_parallel", "ddp", 1.004), ratio("zero1", "ddp_zero", 1.02), ratio("zero2", "fsdp2", 2)]
    (said,) = training_steps.sentences(Made(ratios=ratios, rows=[], single_device=[]))  # type: ignore[arg-type]
    assert said == (
        "Ours takes at most as long as its library equivalent in 1 of 2 medians; it takes longer in zero1 on 2 ranks "
        "(1.02)."
    )


def test_the_commands_end_with_the_page():
    *measuring, last = training_steps.lines()
    assert len(measuring) == len(training_steps.COMMANDS) and last.endswith("benchmarks.report.training_steps")
