"""What docs/transformer.md shows is true: bytes are the closed forms', defaults the options', and its commands work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.problem_options import problem_of
from benchmarks.problems import with_experts
from contract import cost, strategies
from contract.axes import STRATEGIES_OF_BLOCKS, one_axis
from contract.memory import memory
from contract.strategy import RECOMPUTE, Run
from contract.transformer import Transformer
from shardiff.cli import main as cli
from shardiff.record import step_bytes
from shared_tests.tool.answers import say

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "transformer.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TABLES = re.findall(r"^(\|.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
LARGE = Transformer(8, 1024, 2, sequence=1024, heads=8, ff=4096)
SENTENCE = "batch 8, sequence 1024, width 1024, 8 heads, ff 4096 and float32, over 8 ranks"


def table(first: str) -> dict[str, list[str]]:
    """The rows of the table with this heading of its first columns: the strategy or option, and the other cells."""
    (text,) = (one for one in TABLES if one.startswith(first))
    rows = [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in text.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def run_of(strategy: str, recompute: str = "none") -> Run:
    ranks = {"single_device": 1, "pipeline_parallel": 2}.get(strategy, 8)
    return Run("torch", one_axis(strategy, ranks), with_experts(LARGE, [strategy]), recompute=recompute)


def test_the_table_of_strategies_has_each_with_its_axis_and_the_bytes_of_its_closed_form():
    rows = table("| strategy | axis | what is split")
    assert SENTENCE in " ".join(PAGE.split()) and set(rows) == set(STRATEGIES_OF_BLOCKS)
    for strategy, (axis, *_, shown) in rows.items():
        assert axis == strategies.of(strategy).AXIS
        assert number(shown) == step_bytes(cost.communication(run_of(strategy))), strategy


def test_what_recomputing_saves_and_sends_is_the_closed_forms():
    rows = table("| strategy | activations: none")
    assert len(rows) == 5
    for strategy, cells in rows.items():
        runs = {name: run_of(strategy, name) for name in RECOMPUTE}
        held = {name: max(one.activations for one in memory(run)) for name, run in runs.items()}
        sent = {name: step_bytes(cost.communication(run)) for name, run in runs.items()}
        assert sent["selective"] == sent["none"]
        told = held["none"], held["selective"], held["block"], sent["none"], sent["block"]
        assert tuple(map(number, cells)) == told, strategy


def test_the_defaults_are_those_of_the_options():
    shown = {word.strip("-`, "): cells[-1] for name, cells in table("| option").items() for word in name.split(",")}
    usual = problem_of("transformer")
    for name in ("batch", "sequence", "width", "heads", "layers"):
        assert shown[name] == str(getattr(usual, name)), name
    assert isinstance(usual, Transformer) and shown["ff"] == "4 D" and usual.ff == 4 * usual.width
    experts = with_experts(usual, ["expert_parallel"])
    assert isinstance(experts, Transformer) and not usual.experts and f"{experts.experts} for" in shown["experts"]
    assert shown["top-k"] == f"{usual.top_k}, {usual.capacity_factor:g}"


def test_the_table_of_annotations_has_every_strategy_that_only_blocks_have():
    rows = table("| strategy | what must be stated")
    assert set(rows) >= {name for name in STRATEGIES_OF_BLOCKS if strategies.of(name).AXIS in ("tp", "cp", "ep")}
    annotated = ROOT / "jax_impl" / "annotated"
    assert [name for name in rows if not (annotated / f"{name}.py").exists()] == ["ring_attention"]


@pytest.mark.parametrize("line", [line for kind, body in BLOCKS if kind == "sh" for line in body.splitlines()])
def test_a_command_is_accepted(line, nothing_starts, capsys):
    words = shlex.split(line, comments=True)
    if words[0] == "diff":
        assert all((ROOT / word).is_file() for word in words[1:])
    else:
        assert words[0] == "shardiff" and say(words[1:], capsys)[0] == 0


def test_a_refusal_is_the_line_that_is_printed(nothing_starts, capsys):
    shown = [
        one
        for kind, body in BLOCKS
        if kind == "console"
        for one in re.findall(r"^\$ shardiff (.*)\n(.*\n)", body, re.M)
    ]
    assert len(shown) == 2
    for command, printed in shown:
        assert cli.main(shlex.split(command)) == 2
        assert capsys.readouterr().err == printed


def test_links_lead_to_files():
    inside = [link for link in re.findall(r"\]\(([^)]+)\)", PAGE) if "://" not in link]
    assert inside and [link for link in inside if not (ROOT / "docs" / link).exists()] == []
