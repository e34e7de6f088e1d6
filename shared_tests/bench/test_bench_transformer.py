"""`shardiff bench steps` of a transformer with what is recomputed, `bench experts`, and the page that shows both."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.documents.bubbles import Bubbles
from benchmarks.documents.experts import Imbalance
from benchmarks.documents.results_io import parse_as
from benchmarks.documents.steps import Steps
from benchmarks.experts import experts
from benchmarks.experts import view as experts_view
from benchmarks.experts.skewed import DROPPING, OURS, SPARSE
from benchmarks.flops import products
from benchmarks.report import sections
from benchmarks.report import transformer as page
from benchmarks.steps import steps, view
from contract.transformer import Transformer
from shared_tests.bench.pools import shared
from shared_tests.bench.report_documents import piped

BEFORE_FORK = ("benchmarks.steps.torch", "torch._dynamo")
SMALL = Transformer(batch=4, width=16, layers=2, sequence=8, heads=4, ff=24)
RECOMPUTED = ("none", "block", "selective")


@pytest.fixture(scope="module", autouse=True)
def ranks(pool):
    with shared(pool):
        yield


@pytest.fixture(scope="module")
def measured():
    """The document of a run with everything that torch has, and with jit beside shard_map on one device."""
    plan = steps.plan(
        [2], ["single_device", "sequence_parallel"], ("torch", "shard_map", "peer"), SMALL,
        iterations=1, rounds=1, device="cpu", timeout=100, speed_batch=16, recompute=(*RECOMPUTED, "offload"),
    )  # fmt: skip
    short = replace(plan.runs[0], problem=replace(SMALL, layers=1))  # of which jax compiles six programs
    alone = replace(plan, runs=(short,))
    torch = replace(plan, implementations=("torch", "peer"), runs=plan.runs[1:])
    return steps.measure(alone), steps.measure(torch)


def test_contestants_take_part_with_all_that_is_recomputed_and_train_the_same(measured):
    for document, names in zip(measured, (("torch", "shard_map"), ("torch",)), strict=True):
        assert document["failures"] == [] and document["complete"] and document["left_out"] == []
        rows = {(row["implementation"], row["recompute"]): row for row in document["rows"]}
        assert {(name, recompute) for name in names for recompute in RECOMPUTED} <= set(rows)
        for row in rows.values():
            assert row["gradient_difference"] < 1e-5
            if row["recompute"] == "offload":
                assert row["implementation"] == "torch" and row["memory"]["closed_form"] is None
                assert row["memory"]["measured"]["activations"] == 0  # on the device
            elif row["implementation"] == "torch":
                kept = (row["memory"][side]["activations"] for side in ("measured", "closed_form"))
                assert len({*kept}) == 1
        pairs = {(ratio["of"], ratio["to"]) for ratio in document["ratios"]}
        assert {(f"{name} {recompute}", name) for name in names for recompute in RECOMPUTED[1:]} <= pairs
    assert {"modules", "jit"} <= {row["implementation"] for row in measured[0]["rows"]}
    sent = {row["recompute"]: row["wire_bytes"] for row in measured[1]["rows"] if row["implementation"] == "torch"}
    assert sent["selective"] == sent["none"] < sent["block"]


def test_what_is_recomputed_is_shown_beside_what_it_saves(measured):
    result = parse_as(Steps, measured[1])
    text = shown(view.recompute_table(result))
    assert "sequence_parallel" in text
    assert f" {products(SMALL, 'block') / products(SMALL):.2f} " in text  # predicted
    assert max(map(len, text.splitlines())) <= 120
    assert any("recompute" in block.title or "recomputing" in block.title for block in tables(result))


def tables(result):
    chapter = sections.section("steps", result, lambda *_: [])
    return [block for block in chapter.blocks if hasattr(block, "title")]


def shown(*parts):
    console = Console(width=120, file=io.StringIO())
    for part in parts:
        console.print(part)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"problem": SMALL}, "experts are of a transformer"),
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"skews": [-1.0]}, "a skew is from 0, all experts alike, to 4, got -1"),
        ({"ranks": [3]}, "4 experts"),
        ({"timeout": 0.0}, "timeout must be a number of seconds above 0"),
    ],
)
def test_wrong_plans_are_refused(given, reason):
    usual = {"problem": replace(SMALL, experts=4), "ranks": [2], "skews": [0.0], "device": "cpu"}
    with pytest.raises(ValueError, match=reason):
        experts.plan(**{**usual, **given})


def test_popular_experts_need_more_slots_or_drop_more_tokens():
    plan = experts.plan(replace(SMALL, sequence=32, experts=4), [2], [0.0, 3.0], iterations=1, device="cpu", timeout=90)
    document = experts.measure(plan)
    assert document["failures"] == [] and document["complete"]
    result = parse_as(Imbalance, document)
    even, skewed = result.rows
    assert even.busiest_expert < skewed.busiest_expert and even.busiest_rank < skewed.busiest_rank <= 2
    assert even.capacity_factor < skewed.capacity_factor <= 2 and even.dropped < skewed.dropped
    assert set(skewed.contestants) == {OURS, DROPPING, SPARSE} and skewed.difference < 1e-4
    assert max(map(len, shown(experts_view.table(result)).splitlines())) <= 120
    chapter = sections.section("experts", result)
    assert "of the choices are dropped" in chapter.blocks[0].text

    told = [[{"seconds": {OURS: [1.0]}, "difference": 1e-2, "capacity": 4}] * 2]
    assert experts.rows(plan, 2, told)[0]["difference"] == 1e-2


def test_a_page_shows_all_results(measured):
    loads = {"busiest_expert": 1.2, "busiest_rank": 1.1, "capacity": 4, "dropped": 0.1, "difference": 1e-7}
    taken = {name: [0.1] for name in (OURS, DROPPING, SPARSE)}
    plan = experts.plan(replace(SMALL, experts=4), [2], [0.0], iterations=1, device="cpu", timeout=90)
    rows = experts.rows(plan, 2, [[{**loads, "seconds": taken}]] * 2)
    alone, torch = (parse_as(Steps, document) for document in measured)
    imbalance = parse_as(Imbalance, experts.begin(plan) | {"rows": rows})
    results = {"steps": torch, "programs": alone, "recompute": torch, "experts": imbalance}
    text = page.page(results | {"bubbles": parse_as(Bubbles, piped())}, page.of_today())
    assert "DTensor parallelize_module" in text and "Ours takes at most as long" in text
    assert text.count("| 2 | 0 | 1.20 | 1.10 |") == 1
    assert all(f"shardiff {line} --output benchmarks/results/" in text for line in page.COMMANDS.values())


def test_the_page_is_made_from_the_results():
    assert page.PAGE.read_text(encoding="utf-8") == page.page(page.results())
