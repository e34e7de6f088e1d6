"""What cannot work is refused in one line with the numbers, and what can work is not refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.axes import AXES, one_axis
from contract.layout import layout
from contract.problem import DTYPES, Problem
from contract.strategy import IMPLEMENTATIONS, Run, impossible

REFUSED = [
    ({"implementation": "tf"}, "unknown implementation 'tf'; known: torch, shard_map, annotated"),
    ({"strategy": "fsdp"}, "unknown strategy 'fsdp'; known: single_device, data_parallel, tensor_parallel, "
                           "megatron_tensor_parallel, pipeline_parallel, fully_sharded, zero1, zero2, "
                           "sequence_parallel, context_parallel, ring_attention, ulysses, expert_parallel"),
    ({"problem": Problem(dtype="int8")}, "unknown dtype 'int8'; known: float64, float32, bfloat16"),
    ({"optimizer": "lion"}, "unknown optimizer 'lion'; known: sgd, adamw"),
    ({"device": "tpu"}, "unknown device 'tpu'; known: auto, cpu, cuda"),
    ({"degree": 0}, "degree must be at least 1, got 0"),
    ({"degree": -2}, "degree must be at least 1, got -2"),
    ({"problem": Problem(batch=0)}, "batch must be at least 1, got 0"),
    ({"problem": Problem(width=0)}, "width must be at least 1, got 0"),
    ({"problem": Problem(layers=0)}, "layers must be at least 1, got 0"),
    ({"problem": Problem(seed=-1)}, "seed must be at least 0, got -1"),
    ({"steps": 0}, "steps must be at least 1, got 0"),
    ({"microbatches": 0}, "microbatches must be at least 1, got 0"),
    ({"strategy": "single_device", "degree": 2}, "single_device runs on 1 rank, got degree 2"),
    ({"problem": Problem(batch=3)}, "data_parallel over 4 ranks needs a batch of at least 4, got 3"),
    ({"strategy": "tensor_parallel", "problem": Problem(width=10)},
     "tensor_parallel needs a width divisible by its degree: width 10, degree 4"),
    ({"strategy": "megatron_tensor_parallel", "problem": Problem(width=10)},
     "megatron_tensor_parallel needs a width divisible by its degree: width 10, degree 4"),
    ({"strategy": "megatron_tensor_parallel", "problem": Problem(layers=5)},
     "megatron_tensor_parallel splits layers in pairs and needs an even number, got 5"),
    ({"strategy": "pipeline_parallel", "problem": Problem(layers=3)},
     "pipeline_parallel over 4 stages needs at least 4 layers, got 3"),
    ({"strategy": "pipeline_parallel", "problem": Problem(batch=7), "microbatches": 8},
     "8 microbatches need a batch of at least 8, got 7"),
]  # fmt: skip


def changed(strategy="data_parallel", degree=4, **rest):
    """The changes as a Run takes them."""
    return {"axes": one_axis(strategy, degree), **rest}


@pytest.mark.parametrize(("changes", "line"), REFUSED, ids=[line for _, line in REFUSED])
def test_a_run_that_cannot_work_is_refused_in_one_line(changes, line):
    with pytest.raises(ValueError) as caught:
        Run(**changed(**changes))
    assert str(caught.value) == line
    with pytest.raises(ValueError):
        replace(Run(), **changed(**changes))


ALLOWED = [
    {"strategy": "data_parallel", "problem": Problem(batch=5)},
    {"strategy": "data_parallel", "problem": Problem(width=10, layers=5)},
    {"strategy": "tensor_parallel", "problem": Problem(batch=1, width=4, layers=5)},
    {"strategy": "megatron_tensor_parallel", "problem": Problem(batch=1, layers=2)},
    {"strategy": "pipeline_parallel", "problem": Problem(batch=10, width=3, layers=5)},
    {"strategy": "pipeline_parallel", "problem": Problem(batch=1), "microbatches": 1},
    {"strategy": "data_parallel", "problem": Problem(batch=4), "microbatches": 100},  # microbatches are no matter here
]


@pytest.mark.parametrize("changes", ALLOWED, ids=str)
def test_a_run_that_can_work_is_not_refused(changes):
    assert impossible(Run(**changed(**changes))) is None


@given(
    st.sampled_from(tuple(AXES)),
    st.integers(1, 6),
    st.builds(Problem, st.integers(1, 6), st.integers(1, 12), st.integers(1, 8), st.sampled_from(DTYPES)),
    st.integers(1, 8),
)
def test_what_is_allowed_has_a_layout_with_something_for_every_rank(strategy, degree, problem, microbatches):
    try:
        run = Run("torch", one_axis(strategy, degree), problem, microbatches=microbatches)
    except ValueError as error:
        assert "\n" not in str(error) and any(digit in str(error) for digit in "0123456789")
        return
    parts = layout(run)
    assert len(parts) == degree and all(rank for rank in parts)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_mesh_is_named_by_its_axis(implementation):
    runs = {s: Run(implementation, one_axis(s, 1 if s == "single_device" else 2), microbatches=1) for s in AXES}
    named = {s: str(run.mesh) for s, run in runs.items()}
    assert named == {
        "single_device": "1",
        "data_parallel": "dp=2",
        "tensor_parallel": "tp=2",
        "megatron_tensor_parallel": "tp=2",
        "pipeline_parallel": "pp=2",
        "fully_sharded": "fsdp=2",
        "zero1": "fsdp=2",
        "zero2": "fsdp=2",
    }


PIPELINE = one_axis("pipeline_parallel", 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": "2f2b"}, "unknown schedule '2f2b'; known: naive, gpipe, 1f1b, interleaved, zb_h1, zb_v"),
        ({"schedule": "interleaved", "microbatches": 6}, "microbatches that its 4 stages divide, got 6"),
        ({"schedule": "interleaved", "chunks": 1}, "needs at least 2 chunks on every stage, got 1; 1f1b has 1"),
        ({"schedule": "interleaved", "chunks": 3}, "over 4 stages of 3 chunks needs at least 12 layers, got 8"),
        (
            {"schedule": "zb_v", "problem": Problem(layers=7)},
            "over 4 stages of 2 chunks needs at least 8 layers, got 7",
        ),
        ({"schedule": "zb_v", "chunks": 3}, "the schedule zb_v has 2 chunks on every stage, got 3"),
        ({"schedule": "1f1b", "axes": one_axis("data_parallel", 2)}, "needs an axis pp; data_parallel has no pipeline"),
        ({"schedule": "1f1b", "implementation": "annotated"}, "annotated can express GPipe's order only"),
        ({"schedule": "naive", "implementation": "annotated"}, "not the schedule naive; use torch or shard_map"),
        ({"chunks": 0}, "chunks must be at least 1, got 0"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_in_a_line(changes, words):
    Run(axes=PIPELINE, problem=Problem(layers=8))
    with pytest.raises(ValueError) as raised:
        Run(**{"axes": PIPELINE, "problem": Problem(layers=8), **changes})
    assert words in str(raised.value) and "\n" not in str(raised.value)
    assert Run("annotated", PIPELINE, schedule="naive", microbatches=1).in_gpipes_order
