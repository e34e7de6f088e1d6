"""Budgets are parsed, and kept or exceeded; a comparison with a baseline says what has increased, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardiff.budget import check, compare, parse_budget
from shardiff.program import Program
from shardiff.record import Executions, record

GATHER = record("all_gather", "float32", 2_000_000, 4, axis="tp", phase="forward", source="m.py:3")
REDUCE = record("all_reduce", "float32", 1_000_000, 2, axis="dp", phase="backward", executions=Executions(3, 3))
PROGRAM = Program((GATHER, REDUCE))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("all_gather > 1MB", "over budget: all_gather > 1MB: all_gather of 2 MB at m.py:3"),
        ("all_gather > 2MB", None),
        ("all_reduce > 2MB", None),
        ("payload > 2MB", "5 MB"),
        ("all_gather > 1.9 MiB", "all_gather of 2 MB"),
        ("all_gather > 2_000_000", None),
        ("forward > 1MB", "all_gather of 2 MB"),
        ("backward all_reduce > 1000kB", None),
        ("reduce_scatter > 0", None),
        ("all_reduce payload > 2MB", "3 MB"),
        ("dp wire > 2MB", "3 MB"),
        ("tp wire > 2MB", None),
        ("calls > 3", "4 calls"),
        ("total > 4MB", "5 MB"),
        ("total wire > 4.5MB", None),
    ],
)
def test_a_budget_is_kept_or_broken_by_the_numbers(text: str, says: str | None) -> None:
    lines = check(PROGRAM, [parse_budget(text)])
    assert len(lines) == (says is not None) and (says is None or says in lines[0])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("all_gather < 1MB", "write WORDS > SIZE"),
        ("all_gather > much", "write WORDS > SIZE"),
        ("> 1MB", "say what must stay below"),
        ("all_gather all_reduce > 1", "both name an op"),
        ("calls > 3MB", "a number without a unit"),
    ],
)
def test_what_is_no_budget_is_told_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        parse_budget(text)
    assert "\n" not in str(caught.value)


def test_without_a_sum_each_record_is_judged_by_itself() -> None:
    both = [REDUCE, replace(REDUCE, source="m.py:4")]
    assert check(both, [parse_budget("all_reduce > 1MB")]) == []
    assert check(both, [parse_budget("all_reduce payload > 1MB")]) == ["over budget: all_reduce payload > 1MB: 6 MB"]


def test_a_misspelt_word_is_no_budget_that_is_always_kept() -> None:
    with pytest.raises(ValueError, match="'all_gahter' is no op .* or axis .axes here: dp, tp"):
        check(PROGRAM, [parse_budget("all_gahter > 1MB")])


def test_a_baseline_objects_to_more_and_to_nothing_else() -> None:
    assert compare(PROGRAM, PROGRAM) == compare([GATHER], PROGRAM) == compare([], PROGRAM) == []
    [line] = compare(PROGRAM, [GATHER])
    assert line == "more than the baseline: backward all_reduce over dp: 3 calls, 3 MB payload; it had none"
    [line] = compare([GATHER, replace(REDUCE, executions=Executions(4, 4))], PROGRAM)
    assert line.endswith("4 calls, 4 MB payload; it had 3 calls, 3 MB")
    split = replace(REDUCE, payload_bytes=500_000, wire_bytes=500_000, executions=Executions(6, 6))
    assert len(compare([split], [REDUCE])) == 1, "as many bytes in more calls"
    assert len(compare([replace(REDUCE, phase="forward")], [REDUCE])) == 1, "in another phase"
