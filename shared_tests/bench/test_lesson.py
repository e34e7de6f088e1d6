"""A lesson: all that it shows of a strategy or a mesh is what the code, the closed form and the layout say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lesson import lesson as lessons
from benchmarks.lesson import view
from benchmarks.lesson.picture import picture, pieces_of, rows
from contract.axes import STRATEGIES, one_axis, parse_axes
from contract.problem import Problem
from contract.strategy import Run
from contract.transformer import Transformer
from shardiff.cli import main as cli

ROOT = Path(__file__).parents[2]
SIZES = Problem(batch=16, width=16, layers=4)
BLOCKS = Transformer(batch=4, width=16, layers=2, sequence=16, heads=4, ff=24)


def lesson_of(axes, problem=SIZES) -> lessons.Lesson:
    return lessons.Lesson(Run("torch", axes, problem), (), ())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_page_has_the_three_files_word_for_word(strategy):
    made = lesson_of(one_axis(strategy, 4))
    files = lessons.files(strategy)
    assert files["torch"] == (ROOT / f"torch_impl/explicit/{strategy}.py").read_text()
    assert files["annotated"] == (ROOT / f"jax_impl/annotated/{strategy}.py").read_text()
    page = view.page(made)
    assert page.count("<pre") == 4 and "RULES = {" in page and "data:image/svg+xml" in page


def test_a_page_of_what_no_annotation_expresses_has_the_two_files_that_there_are():
    page = view.page(lesson_of(parse_axes("cp=2"), BLOCKS))
    assert page.count("<pre") == 3 and "ring_attention in 2 files" in page
    assert "transformer, batch 4, sequence 16" in page


def test_the_tokens_of_all_ranks_are_the_sequence():
    def told(mesh, *strategies):
        run = Run("torch", parse_axes(mesh, strategies), BLOCKS)
        return [[(one.start, one.stop) for one in lessons.tokens_of(run, rank)] for rank in range(run.world_size)]

    assert told("cp=4") == [[(0, 2), (14, 16)], [(2, 4), (12, 14)], [(4, 6), (10, 12)], [(6, 8), (8, 10)]]
    assert told("cp=2", "ulysses") == [[(0, 8)], [(8, 16)]]
    assert told("tp=2,cp=2", "sequence_parallel") == [[(0, 4)], [(4, 8)], [(12, 16)], [(8, 12)]]
    assert told("dp=2,tp=2") == [[(0, 16)]] * 4


def test_a_transformer_is_drawn_by_its_matrices_and_experts_one_below_the_other(tmp_path):
    experts = replace(BLOCKS, experts=4)
    made = lesson_of(parse_axes("ep=2,tp=2"), experts)
    assert [label for label, _, _ in rows(made.run)] == [
        "samples, tokens\nX[B, S, D]",
        "layer 0\nq, k, v, o, gain",
        "layer 1\nrouter, up, down, gain",
    ]
    _, layer = lessons.held_by(made.run, 3, "parameters")
    assert pieces_of(layer.cuts.up, experts.shape(1).up) == [(0.5, 0.5, 0.5, 0.25), (0.5, 0.75, 0.5, 0.25)]
    assert pieces_of(layer.cuts.down, experts.shape(1).down) == [(0, 0.625, 1, 0.125), (0, 0.875, 1, 0.125)]
    picture(made, tmp_path / "held.png")
    assert (tmp_path / "held.png").stat().st_size > 10_000


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
    blocks = ["--model", "transformer", "--layers", "1", "--recompute", "block"]
    assert cli.main(["lesson", "ulysses", *blocks, "--target", "none", "--degree", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["held"]["parameters"][1][0] == "gain0[:] q0[:, :] k0[:, :] v0[:, :] o0[:, :]"
    assert document["problem"]["sequence"] == 32 and document["problem"]["recompute"] == "block"
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
