"""What docs/benchmarks.md says of pipeline schedules is what its generator makes of the results."""

from __future__ import annotations

from types import SimpleNamespace as Made

from benchmarks.report import schedules


def test_the_part_of_the_page_is_made_of_the_results():
    page = schedules.PAGE.read_text(encoding="utf-8")
    assert schedules.replaced(page) == page


def test_a_schedule_beside_its_library_equivalent_has_a_ratio_for_each_number_of_stages():
    def ratio(ranks: int, to: str, median: float) -> Made:
        return Made(ranks=ranks, of="torch", to=to, ratio=Made(median=median, q1=median - 0.1, q3=median + 0.1))

    result = Made(rows=[Made(ranks=2), Made(ranks=4)], ratios=[ratio(2, "pipelining", 0.9), ratio(4, "other", 0.5)])
    made = schedules.peers({"1f1b": result})  # type: ignore[dict-item]
    assert list(made.columns) == ["schedule", "2 stages", "4 stages"]
    assert [[cell.text for cell in row] for row in made.rows] == [["1f1b", "0.90 (0.80 to 1.00)", "-"]]


def test_what_is_far_from_the_closed_form_is_named_and_the_commands_end_with_the_page():
    def row(order: str, of_theory: float) -> Made:
        return Made(order=order, theory=0.02, of_theory=of_theory, kept=[4], kept_theory=[4])

    said = schedules.within([row("1f1b", 1.05), row("zb_v", 1.14)])  # type: ignore[list-item]
    assert said == (
        "1 of 2 bubbles are within 10 % of the closed form; the other is zb_v (1.14 of 0.020). What is kept is 1.00 of "
        "its closed form."
    )
    *measuring, last = schedules.lines()
    assert len(measuring) == 2 + len(schedules.PEERS) and last.endswith("benchmarks.report.schedules")
