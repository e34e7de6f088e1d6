"""How `shardiff plan --prove` judges: what is run, what is calibrated, errors, choices and crossovers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.lab.namespaces import LEAST_BURST, Shape, burst_of, shaped
from benchmarks.plan.prove import calibrate, rivals
from benchmarks.plan.prove.campaign import Campaign, measured
from benchmarks.plan.prove.steps import Measured, Paced
from benchmarks.plan.prove.summary import Line, crossing, summary
from contract.axes import parse_axes
from contract.problem import Problem
from contract.strategy import Run

PACED = Paced(2e9, 2e9)
PROBLEM = Problem(128, 256, 4)


def run(mesh: str) -> Run:
    return Run(axes=parse_axes(mesh), problem=PROBLEM, steps=1, microbatches=2, device="cpu")


def test_what_a_step_takes_beside_its_products_is_that_of_a_step_that_sends_nothing():
    """The slowest rank of a pipeline computes 2 x (2 + 4) products, and does not wait for the other stage."""
    taken = [[0.9, 5.0, 0.8], [1.0, 5.0, 0.7]]
    answers = [Measured(seconds, [False, True, False], 0, 0.0, 0.0, {}) for seconds in taken]
    asked: list[Any] = []
    lab: Any = SimpleNamespace(shape=Shape(1, 2), call=lambda *what: asked.append(what) or answers)
    products = 2 * (2 + 4) * 2 * 64 * 256 * 256 / 1e9
    update = 7 * 4 * 2 * (256 * 256 + 256) / 1e9
    assert calibrate.unhidden(lab, Paced(1e9, 1e9), run("pp=2")) == pytest.approx(0.9 - products - update)
    assert asked[0][-1] is True  # on groups that send nothing


def test_a_campaign_has_every_mesh_in_every_order_that_matters():
    one, two = Campaign().runs(Shape(1, 4), PROBLEM), Campaign().runs(Shape(2, 2), PROBLEM)
    assert {"dp=4", "tp=4", "pp=4", "dp=2,tp=2"} <= {str(run.mesh) for run in one}
    assert {"dp=2,tp=2", "tp=2,dp=2"} <= {str(run.mesh) for run in two}


def test_problems_take_the_rates_in_turn_where_that_is_asked_for():
    usual = Campaign(rates=(1.0, 2.0, 3.0, 4.0), in_turn=True)
    first, second = usual.problems
    assert usual.cases() == [(1.0, first), (2.0, second), (3.0, first), (4.0, second)]
    assert len(Campaign(rates=(1.0, 2.0)).cases()) == 4
    runs = [run for shape in usual.shapes for _, problem in usual.cases() for run in usual.runs(shape, problem)]
    assert len(runs) >= 100


def test_rivals_that_do_not_train_alike_are_no_rivals():
    losses = dict.fromkeys(rivals.RIVALS, 1.0)

    def call(*asked: object) -> list[dict]:
        return [{name: {"seconds": [2.0, 4.0], "sent": 10, "loss": loss} for name, loss in losses.items()}] * 2

    lab: Any = SimpleNamespace(shape=Shape(1, 2), rates=lambda *rates: None, call=call)
    assert [one["seconds"] for one in rivals.measure(lab, 1e6, PROBLEM, PACED, 2)] == [3.0] * 5
    losses["DDP"] = 1.1
    with pytest.raises(ValueError, match=r"losses differ after 3 steps: .*'DDP': 1.1"):
        rivals.measure(lab, 1e6, PROBLEM, PACED, 2)


def test_a_token_bucket_has_half_a_millisecond_of_the_rate():
    assert burst_of(1e9) == 62_500 and burst_of(1e6) == LEAST_BURST
    assert shaped("p0", 1e9).startswith("qdisc replace dev p0 root tbf rate 1000000000bit burst 62500 limit")


def entry(mesh: str, rate: float, predicted: float, measured: float, other: float = 1.0) -> dict:
    name, size = mesh.split("=")
    times = {"seconds": predicted, "max_of_compute_and_communication": other, "memory_bytes": 90}
    return {
        "shape": "1x2",
        "rate_bits_per_second": rate,
        "batch": 1,
        "width": 1,
        "predicted": times | {"mesh": {name: int(size)}},
        "measured": {"seconds": measured, "memory_bytes": 100, "flagged": 1, "kept_flagged": False},
    }


def test_a_proof_is_judged_by_its_errors_its_choices_and_its_crossovers():
    configurations = [
        entry("dp=2", 1e6, 2.0, 2.2),
        entry("tp=2", 1e6, 1.0, 1.0),
        entry("dp=2", 4e6, 1.0, 1.0, 2.0),
        entry("tp=2", 4e6, 2.0, 2.2),
    ]
    found = summary(configurations)
    assert found is not None
    assert found["simulation"]["median"] == pytest.approx((0 + 1 / 11) / 2)
    assert found["memory"]["largest"] == pytest.approx(0.1)
    assert found["choices"] == {"right": 2, "of": 2} and found["choices_by_max"]["right"] == 0
    (crossed,) = found["crossovers"]
    assert crossed["predicted_bits_per_second"] == pytest.approx(1.6e6)  # 2 - 1, then 1 - 2: half way in 1 / rate
    assert crossed["measured_bits_per_second"] == pytest.approx(1.6e6)
    assert crossed["apart"] == pytest.approx(0, abs=1e-9)
    assert crossed["steep"] == pytest.approx(math.log(2.2 * 2.2) / math.log(4))
    assert summary([configurations[0] | {"measured": None}]) is None
    assert crossing(Line(1, 10, 2.0, 3.0), Line(1, 10, 1.0, 1.0)) is None


def test_wrong_values_and_bytes_that_no_plan_explains_fail_a_proof():
    gloo = calibrate.Gloo(1e9, {}, {("all_reduce", 2): 1.0, ("all_gather", 2): 1.0, ("reduce_scatter", 2): 2.0})
    one = run("tp=2")
    sent = 3 * 128 * 256 * 4

    def found(difference: float, sent: int) -> Measured:
        return Measured([1.0], [False], sent, 0.0, difference, {"parameters": 1})

    assert measured(one, [found(1e-6, sent)] * 2, gloo)["seconds"] == 1.0
    with pytest.raises(ValueError, match="differ from the reference's by 1.0e-03"):
        measured(one, [found(1e-3, sent)] * 2, gloo)
    with pytest.raises(ValueError, match="rank 0 has sent"):
        measured(one, [found(1e-6, 2 * sent)] * 2, gloo)
