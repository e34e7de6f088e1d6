"""A run of some dozens of steps opens no more files and sockets, and stays equal to the reference; see `long_runs`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contract.strategy import IMPLEMENTATIONS
from shared_tests.looks import Look
from shared_tests.proof import long_runs

STRATEGY = {"torch": "data_parallel", "shard_map": "pipeline_parallel", "annotated": "tensor_parallel"}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sixty_steps_hold_what_a_thousand_have_to(implementation, pool):
    runs = {run.implementation: run for run in long_runs.plan([STRATEGY[implementation]], "float64", 60)}
    row = long_runs.measure(runs[implementation], pool)
    assert [line for line in row["failures"] if "grew" not in line] == []  # memory has not settled yet
    assert len(row["processes"]) == (2 if implementation == "torch" else 1)
    assert all(one["looks"] == 45 and one["files"][0] > 0 for one in row["processes"])


def looks(**each):
    """A hundred looks, every tenth step: a constant, or a function of the step."""
    held = {"rss": 1 << 28, "files": 8, "sockets": 3, **each}
    return [Look(i, *(v(i) if callable(v) else v for v in held.values())) for i in range(0, 1000, 10)]


def test_what_is_not_flat_is_told():
    def told(**each):
        return long_runs.not_flat(1, long_runs.process_row(looks(**each), 0))

    assert told() == []
    assert told(rss=lambda i: (1 << 28) + 4_000_000 * (i > 200)) == []  # warming up
    assert told(rss=lambda i: (1 << 28) + 8192 * i) == ["process 1 grew by 4096000 of 2097152 bytes"]
    assert told(files=lambda i: 8 + (i > 900)) == ["process 1 had 8 to 9 files"]
    assert told(sockets=lambda i: 3 + i // 500) == ["process 1 had 3 to 4 sockets"]


def test_the_tolerance_is_the_suite_s_but_for_what_torch_s_decay_adds():
    torch64, jax64, _ = long_runs.plan(["data_parallel"], "float64", 1000)
    torch32, jax32, _ = long_runs.plan(["data_parallel"], "float32", 1000)
    assert (long_runs.tolerance(jax64), long_runs.tolerance(jax32)) == (1e-12, 1e-5)
    assert long_runs.tolerance(torch64) < 1.2e-12
    assert long_runs.tolerance(torch32) == pytest.approx(1e-5 + 3 * 1.36e-5, rel=0.01)
    assert long_runs.tolerance(replace(torch32, optimizer="sgd")) == 1e-5
