"""Schedules under shard_map: the reference's gradients, the closed form's permutes, memory by the schedule's peak."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import numpy as np

from contract import cost
from contract.axes import parse_axes
from contract.layout import merge
from contract.problem import Problem
from contract.strategy import Run
from jax_impl import compose, specs, train
from jax_impl.mesh import make_mesh
from shardiff import hlo
from shardiff.ranks.jax_devices import devices
from shared_tests.evidence import each

SIZES = Problem(batch=7, width=8, layers=4, dtype="float64")  # microbatches of different sizes


def make(mesh: str, schedule: str, microbatches: int, *strategies: str, **rest) -> Run:
    settings = {"problem": SIZES, "steps": 1, "device": "cpu", "schedule": schedule, "microbatches": microbatches}
    return Run("shard_map", parse_axes(mesh, strategies), **{**settings, **rest})


RUNS = [
    make("pp=2", "1f1b", 3, problem=replace(SIZES, layers=3)),  # a stage of two layers, and one of one
    make("pp=2", "zb_h1", 2, problem=replace(SIZES, layers=2)),
    make("dp=2,pp=2", "zb_v", 2),
    make("pp=2,tp=2", "1f1b", 2, "megatron_tensor_parallel"),
    make("pp=2,tp=2", "interleaved", 2, "tensor_parallel"),
]


def compiled(run: Run):
    """(the program for one step's loss and gradients, its arguments, its mesh)."""
    with jax.enable_x64(True):
        mesh = make_mesh(run, devices(run.world_size, "cpu"))
        params, batch = train.make_params(mesh, run), train.make_batch(mesh, run, 0)
        step = jax.jit(lambda params, batch: compose.loss_and_grads(params, batch, mesh, run))
        lowered = step.lower(params, batch)
        return lowered.compile(), (params, batch), mesh


@each(RUNS, RUNS[3:4], lambda run: f"{run.strategy}-{run.mesh}-{run.schedule}-m{run.microbatches}")
def test_loss_and_gradients_are_the_reference_s_and_permutes_the_closed_form_s(run, reference_of):
    step, arguments, mesh = compiled(run)
    with jax.enable_x64(True):
        loss, grads = step(*arguments)
    want = reference_of(run)
    assert abs(float(loss) - want.losses[0]) <= 1e-12 * want.losses[0]
    got = merge(run, [train.local_layers(grads, mesh, run, rank) for rank in range(run.world_size)])
    for i, (mine, theirs) in enumerate(zip(got, want.grads, strict=True)):
        for name, a, b in zip("wb", mine, theirs, strict=True):
            assert np.linalg.norm(a - b) <= 1e-12 * np.linalg.norm(b), f"gradient of {name}{i}"

    found = run.mesh.named(hlo.read(step.as_text()).records)
    predicted = cost.communication(run)
    permutes, formula = (
        Counter(
            (r.phase, r.payload_bytes, tuple(sorted(r.edges or ()))) for r in records if r.op == "collective_permute"
        )
        for records in (found, predicted)
    )
    assert permutes == formula
    for axis in {r.axis for r in predicted}:  # what a stage sends within its action, another sends in other ticks
        low, high = (
            sum(r.payload_bytes * (getattr(r.executions, end) or 0) for r in found if r.axis == axis)
            for end in ("min", "max")
        )
        assert low <= sum(r.payload_bytes for r in predicted if r.axis == axis) <= high, axis


def test_temporaries_grow_with_the_peak_and_not_with_the_microbatches():
    def temporaries(schedule: str, microbatches: int) -> int:
        problem = Problem(batch=32 * microbatches, width=16, layers=2, dtype="float32")
        run = make("pp=2", schedule, microbatches, problem=problem)
        mesh = make_mesh(run, devices(2, "cpu"))
        params, batch = specs.abstract(mesh, run)
        step = jax.jit(lambda params, batch: compose.loss_and_grads(params, batch, mesh, run))
        plan = step.lower(params, batch).compile().memory_analysis()
        return plan.temp_size_in_bytes

    more = {name: temporaries(name, 6) - temporaries(name, 2) for name in ("gpipe", "1f1b")}
    assert more["1f1b"] < 0.25 * more["gpipe"]
