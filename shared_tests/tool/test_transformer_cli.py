"""`--model transformer` on the command line: what is planned, refused, printed and written down."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import check, diff_view
from benchmarks import diff as diff_command
from benchmarks.diff_strategies import compare
from benchmarks.documents.check import Check
from benchmarks.documents.diff import Diffs
from benchmarks.documents.results_io import parse, parse_as
from benchmarks.problem_options import problem_of
from benchmarks.problems import outline
from benchmarks.report import check as report_check
from benchmarks.report.compare import figures
from benchmarks.steps import command as steps_command
from contract import cost
from contract.axes import STRATEGIES_OF_BLOCKS, parse_axes
from contract.problem import Problem
from contract.strategy import IMPLEMENTATIONS, Run
from contract.transformer import Transformer
from shardiff.cli import main as cli
from shared_tests.bench.report_documents import MACHINE

TINY = "--model transformer --batch 4 --sequence 8 --width 16 --heads 4 --ff 24 --layers 2".split()
SIZES = {"model": "transformer", "batch": 4, "sequence": 8, "width": 16, "heads": 4, "ff": 24, "layers": 2}
REFUSED = {
    "check --heads 4": "--heads is for a transformer: give --model transformer, or leave it out",
    "bench steps --capacity-factor 1": "--capacity-factor is for a transformer: give --model transformer, or leave it "
    "out",
    "diff data_parallel --sequence 8": "--sequence is for a transformer: give --model transformer, or leave it out",
    "check --recompute block": "an MLP stores what its backward pass needs: recompute is for a transformer's blocks",
    "check --model gpt": "unknown model 'gpt'; known: mlp, transformer",
    "check --model transformer --top-k 1": "--top-k is for experts: give --experts too, or leave it out",
    "check --model transformer --experts 0": "experts must be at least 1, got 0; without --experts, "
    "every block has an MLP",
    "check --model transformer --heads 3": "heads must divide the width: width 128, 3 heads",
    "check --model transformer --sequence 0": "sequence must be at least 1, got 0",
    "check --model transformer --experts 4 --capacity-factor inf": "capacity-factor must be a number above 0, got inf",
    "check --model transformer --experts 2 --top-k 3": "a token cannot go to 3 of 2 experts",
    "check --model transformer --recompute all": "unknown recompute 'all'; known: none, block, selective",
    "check --model transformer --strategy tensor_parallel": "tensor_parallel splits every layer by columns; in a "
    "transformer, use megatron_tensor_parallel",
    "check --model transformer --strategy ulysses --sequence 30": "ulysses needs a sequence that divides into 4 "
    "pieces, got 30 tokens",
    "check --model transformer --experts 8 --mesh cp=2": "ring_attention cannot split the sequence where experts count "
    "their tokens over all of it",
    "check --model transformer --strategy expert_parallel --experts 6": "expert_parallel needs experts that its degree "
    "divides: 6 experts, degree 4",
    "check --strategy ring_attention": "ring_attention splits the sequence of a transformer, and the problem is an MLP",
    "diff ring_attention --model transformer": "no annotation derives a ring: what XLA makes of a split sequence is "
    "context_parallel",
    "lesson sequence_parallel": "sequence_parallel splits blocks of a transformer, and the problem is an MLP",
}


@pytest.mark.parametrize(("arguments", "line"), REFUSED.items(), ids=REFUSED)
def test_what_a_transformer_cannot_be_is_refused_in_one_line(arguments, line, nothing_starts, capsys):
    assert cli.main(arguments.split()) == 2
    assert capsys.readouterr() == ("", f"shardiff: {line}\n")


def of(run: Run) -> Transformer:
    assert isinstance(run.problem, Transformer)
    return run.problem


def test_the_default_plan_has_every_strategy_of_a_transformer_and_experts_where_they_are_split():
    runs = check.plan((), problem=problem_of("transformer"))
    ran = {(run.implementation, run.strategy) for run in runs}
    every = {(one, strategy) for one in IMPLEMENTATIONS for strategy in STRATEGIES_OF_BLOCKS}
    assert every - ran == {("annotated", "ring_attention")} and len(runs) == len(ran)
    assert {run.strategy for run in check.plan(["annotated"], problem=problem_of("transformer"))} == {
        strategy for implementation, strategy in ran if implementation == "annotated"
    }
    assert {of(run).experts for run in runs if run.strategy == "expert_parallel"} == {8}
    assert {of(run).experts for run in runs if run.strategy != "expert_parallel"} == {0}


def test_with_experts_everything_has_them_and_nothing_splits_the_sequence_over_cp():
    runs = check.plan((), problem=problem_of("transformer", experts=4, top_k=1))
    assert {(of(run).experts, of(run).top_k) for run in runs} == {(4, 1)}
    left_out = set(STRATEGIES_OF_BLOCKS) - {run.strategy for run in runs}
    assert left_out == {"context_parallel", "ring_attention", "ulysses"}


def test_meshes_have_the_axes_cp_and_ep(ideal_runs, capsys):
    assert cli.main(["check", *TINY, "--mesh", "cp=2,tp=2", "--mesh", "dp=2,ep=2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["implementation"], row["mesh"], row["experts"]) for row in rows] == [
        *((implementation, mesh, experts) for implementation in ("torch", "shard_map")
          for mesh, experts in (("cp=2,tp=2", 0), ("dp=2,ep=2", 8))),
        ("annotated", "dp=2,ep=2", 8),
    ]  # fmt: skip


def test_json_of_check_has_the_sizes_that_all_rows_share_and_the_experts_of_each(ideal_runs, capsys):
    strategies = ["--strategy", "sequence_parallel", "--strategy", "expert_parallel"]
    assert cli.main(["check", *TINY, *strategies, "--degree", "2", "--recompute", "block", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"].items() >= {**SIZES, "top_k": 2, "capacity_factor": 1, "recompute": "block"}.items()
    assert {(row["strategy"], row["experts"]) for row in document["rows"]} == {
        ("sequence_parallel", 0),
        ("expert_parallel", 8),
    }
    assert {run.recompute for run in ideal_runs} == {"block"}
    read = parse_as(Check, document)
    assert (read.settings.model, read.settings.ff, read.rows[-1].experts) == ("transformer", 24, 8)
    draw: Any = lambda *_: iter(())  # noqa: E731
    shown = str([*report_check.blocks(read, draw)])
    assert "All runs train a transformer: batch 4, sequence 8, width 16, heads 4, ff 24, layers 2, recompute" in shown
    assert all(setting.endswith(", transformer") for _, setting in figures(read))  # an MLP's are others
    with pytest.raises(ValueError, match="mlp or transformer"):
        parse("check", {**document, "settings": {**document["settings"], "model": "gpt"}})


def test_json_of_an_mlp_has_no_word_about_transformers(ideal_runs, capsys):
    assert cli.main("check --width 8 --degree 2 --strategy data_parallel --json".split()) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["settings"]) == ["batch", "width", "layers", "microbatches", "schedule", "device"]
    assert "experts" not in document["rows"][0]
    (run, *_) = ideal_runs
    assert "problem" not in compare(replace(run, implementation="annotated"), "cpu:2", [], []).to_json()


def test_the_table_names_the_model_its_sizes_and_what_no_annotation_derives(ideal_runs, capsys):
    strategies = ["--strategy", "ring_attention", "--strategy", "expert_parallel"]
    assert cli.main(["check", *TINY, *strategies, "--degree", "2", "--recompute", "selective"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "5 of 5 equal the single-device reference" in out
    assert (
        "transformer, batch 4, sequence 8, width 16, 4 heads, ff 24, 2 blocks, 3 steps, float32, adamw, recompute "
        "selective; expert_parallel with 8 experts, top 2, capacity factor 1 No annotation derives a ring, so "
        "ring_attention is not among the annotated ones"
    ) in out


def test_a_diff_plans_and_writes_the_sizes_of_its_run(monkeypatch):
    planned = []
    monkeypatch.setattr(diff_command, "answer_diff", lambda pairs, *rest: planned.extend(pairs) or 0)
    assert (
        cli.main(["diff", "sequence_parallel", "expert_parallel", *TINY, "--degree", "2", "--recompute", "block"]) == 0
    )
    (first, _), (second, _) = planned
    assert first.recompute == second.recompute == "block"
    assert (first.problem.experts, second.problem.experts) == (0, 8)
    made = compare(second, "cpu:2", cost.communication(second.in_torch), [])
    assert made.to_json()["problem"].items() >= {**SIZES, "experts": 8, "recompute": "block"}.items()
    assert "2 blocks, 8 experts, top 2, capacity factor 1, float32, recompute block" in str(next(diff_view.parts(made)))


def test_a_document_of_diffs_has_each_run_with_its_own_problem():
    problem = Transformer(4, 16, 2, sequence=8, heads=4, ff=24, experts=4)
    run = Run("annotated", parse_axes("dp=2,ep=2"), problem, microbatches=1, recompute="selective")
    mlp = Run("annotated", parse_axes("dp=2"), Problem(8, 16, 4), microbatches=1)
    empty = {"products": 0, "flops": 0, "transposes": 0, "transposed_bytes": 0, "copies": 0, "copied_bytes": 0}
    diffs = [compare(one, f"cpu:{one.world_size}", [], [], work=empty).to_json() for one in (run, mlp)]
    settings = {"batch": 8, "width": 16, "layers": 4, "dtype": "float32", "microbatches": 1}
    document = {"kind": "diff", "machine": MACHINE, "settings": settings, "diffs": diffs, "skipped": []}
    read = parse_as(Diffs, document)
    assert read.runs_of_diffs() == [run, mlp]
    assert len({setting for _, setting in figures(read)}) == 2


def test_bench_steps_takes_the_transformer_and_recomputes_on_one_device_too(monkeypatch):
    planned = []
    monkeypatch.setattr(steps_command, "answer", lambda plan, *rest: planned.append(plan) or 0)
    asked = "bench steps --strategy single_device --strategy expert_parallel --ranks 2 --recompute block".split()
    assert cli.main([*asked, *TINY]) == 0
    (plan,) = planned
    told = {run.strategy: (run.problem.experts, run.recompute, outline(run.problem)) for run in plan.runs}
    assert {name: one[:2] for name, one in told.items()} == {
        "single_device": (0, "block"),
        "expert_parallel": (8, "block"),
    }
    assert all("transformer, batch 4, sequence 8" in words for _, _, words in told.values())
