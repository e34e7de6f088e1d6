"""A lesson: all that it shows of a strategy or a mesh is what the code, the closed form and the layout say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lesson import lesson as lessons
from benchmarks.lesson import view
from benchmarks.lesson.picture import picture, rows
from contract.axes import STRATEGIES, one_axis, parse_axes
from contract.problem import Problem
from contract.strategy import Run
from shardiff.cli import main as cli

ROOT = Path(__file__).parents[2]
SIZES = Problem(batch=16, width=16, layers=4)


def lesson_of(axes) -> lessons.Lesson:
    return lessons.Lesson(Run("torch", axes, SIZES), (), ())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_page_has_the_three_files_word_for_word(strategy):
    made = lesson_of(one_axis(strategy, 4))
    files = lessons.files(strategy)
    assert files["torch"] == (ROOT / f"torch_impl/explicit/{strategy}.py").read_text()
    assert files["annotated"] == (ROOT / f"jax_impl/annotated/{strategy}.py").read_text()
    page = view.page(made)
    assert page.count("<pre") == 4 and "RULES = {" in page and "data:image/svg+xml" in page


def test_the_samples_of_all_ranks_are_the_batch():
    for mesh in ("dp=2,fsdp=2,tp=2", "fsdp=2,dp=2,pp=2"):
        run = Run("torch", parse_axes(mesh), SIZES)
        held = {(mine.start, mine.stop) for mine in (lessons.rows_of(run, rank) for rank in range(8))}
        assert sorted(held) == [(0, 4), (4, 8), (8, 12), (12, 16)]
    run = Run("torch", parse_axes("dp=3"), Problem(batch=10, width=16, layers=4))
    assert [lessons.rows_of(run, rank) for rank in range(3)] == [slice(0, 4), slice(4, 7), slice(7, 10)]


def test_what_is_split_beside_the_parameters_has_a_row_of_its_own(tmp_path):
    assert [label for label, _, _ in rows(lesson_of(one_axis("zero2", 4)).run)][3:] == [
        "gradient\nof layer 0",
        "optimizer state\nof layer 0",
    ]
    assert len(rows(lesson_of(one_axis("fully_sharded", 4)).run)) == 3
    picture(lesson_of(parse_axes("dp=2,fsdp=2,tp=2")), tmp_path / "held.png")
    assert (tmp_path / "held.png").stat().st_size > 10_000


def test_the_command_prints_a_lesson_or_its_json(capsys, tmp_path):
    where = str(tmp_path / "lesson.html")
    assert cli.main(["lesson", "zero1", "--target", "none", "--degree", "2", "--json", "--output", where]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["mesh"] == {"fsdp": 2} and where in err and document["diffs"] == []
    assert document["held"]["optimizer_state"][1][0] == "w0[512:1024, :] b0[512:1024]"
    assert cli.main(["lesson", "--mesh", "dp=2,fsdp=2", "--target", "none"]) == 0
    out = capsys.readouterr().out
    assert "Who holds what" in out and "fully_sharded, shard_map" in out and "Memory of a rank" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a strategy, such as shardiff lesson fully_sharded, or a --mesh"),
        (["zero1", "zero2"], "several strategies need a --mesh with an axis for each"),
        (["zero1", "--output", "x.md"], "output"),
        (["magic"], "unknown strategy 'magic'"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(words, said, capsys):
    assert cli.main(["lesson", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
