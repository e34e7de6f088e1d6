"""What cannot work is refused in one line with the numbers, and what can work is not refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.axes import ALL_AXES, AXES, ON_AXES, Axis, one_axis, parse_axes
from contract.layout import layout
from contract.problem import DTYPES, Problem
from contract.share import length, names
from contract.strategy import IMPLEMENTATIONS, Run, impossible
from contract.transformer import Transformer

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


BLOCKS = Transformer(batch=4, width=16, layers=2, sequence=8, heads=4, ff=24)
EXPERTS = replace(BLOCKS, experts=4)
MLP = Problem(batch=4, width=16, layers=4)
RING = "no annotation derives a ring: what XLA makes of a split sequence is context_parallel"
BLOCKS_REFUSED = [  # mesh, strategies, problem, the line
    ("cp=3", ["context_parallel"], BLOCKS,
     "context_parallel needs a sequence that divides into 3 pieces, got 8 tokens"),
    ("cp=8", ["ring_attention"], BLOCKS, "ring_attention needs a sequence that divides into 16 pieces, got 8 tokens"),
    ("cp=3", ["ulysses"], BLOCKS, "ulysses needs a sequence that divides into 3 pieces, got 8 tokens"),
    ("cp=8", ["ulysses"], BLOCKS, "ulysses needs heads that its degree divides: 4 on every rank, degree 8"),
    ("cp=4,tp=2", ["ulysses"], BLOCKS, "ulysses needs heads that its degree divides: 2 on every rank, degree 4"),
    ("tp=3", [], BLOCKS, "megatron_tensor_parallel needs heads divisible by its degree: 4 heads, degree 3"),
    ("tp=4", [], replace(BLOCKS, ff=6),
     "megatron_tensor_parallel needs an MLP width divisible by its degree: ff 6, degree 4"),
    ("tp=3", ["sequence_parallel"], BLOCKS, "sequence_parallel needs heads divisible by its degree: 4 heads, degree 3"),
    ("tp=2", ["sequence_parallel"], replace(BLOCKS, sequence=7),
     "sequence_parallel needs a sequence divisible by its degree: 7 tokens, degree 2"),
    ("ep=3", [], EXPERTS, "expert_parallel needs experts that its degree divides: 4 experts, degree 3"),
    ("ep=2", [], replace(EXPERTS, batch=5), "expert_parallel needs a batch divisible by its degree: batch 5, degree 2"),
    ("ep=2", [], BLOCKS, "expert_parallel splits the experts of a transformer, and the problem has none"),
    ("pp=4", [], BLOCKS, "pipeline_parallel over 4 stages needs at least 4 blocks, got 2"),
    ("fsdp=3", [], BLOCKS, "fully_sharded needs a width divisible by its degree: width 16, degree 3"),
    ("fsdp=4", [], replace(BLOCKS, width=4, heads=2, ff=6),
     "fully_sharded needs its degree to divide the rows of every parameter: one has 6, degree 4"),
    ("ep=2,fsdp=4", ["zero1"], EXPERTS,
     "zero1 needs its degree to divide the rows of every parameter: one has 2, degree 4"),
    *(("cp=2", [name], EXPERTS,
       f"{name} cannot split the sequence where experts count their tokens over all of it")
      for name in ("context_parallel", "ring_attention", "ulysses")),
    ("tp=2", ["tensor_parallel"], BLOCKS,
     "tensor_parallel splits every layer by columns; in a transformer, use megatron_tensor_parallel"),
    ("tp=2", ["sequence_parallel"], MLP, "sequence_parallel splits blocks of a transformer, and the problem is an MLP"),
    *(("cp=2", [name], MLP, f"{name} splits the sequence of a transformer, and the problem is an MLP")
      for name in ("context_parallel", "ring_attention", "ulysses")),
    ("ep=2", [], MLP, "expert_parallel splits the experts of a transformer, and the problem has none"),
    ("dp=2", [], replace(BLOCKS, heads=3), "heads must divide the width: width 16, 3 heads"),
    *(("dp=2", [], replace(EXPERTS, **{name: 0}), f"{name.replace('_', '-')} must be at least 1, got 0")
      for name in ("sequence", "heads", "ff", "top_k")),
    ("dp=2", [], replace(BLOCKS, experts=-1), "experts must be at least 0, got -1"),
    ("dp=2", [], replace(EXPERTS, top_k=5), "a token cannot go to 5 of 4 experts"),
    *(("dp=2", [], replace(EXPERTS, capacity_factor=value),
       f"capacity-factor must be a number above 0, got {value:g}")
      for value in (0, -1.5, float("nan"), float("inf"))),
]  # fmt: skip


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("mesh", "strategies", "problem", "line"), BLOCKS_REFUSED, ids=str)
def test_every_side_refuses_the_same_transformers_in_the_same_line(mesh, strategies, problem, line, implementation):
    with pytest.raises(ValueError) as caught:
        Run(implementation, parse_axes(mesh, tuple(strategies)), problem, microbatches=1)
    assert str(caught.value) == (RING if (implementation, *strategies) == ("annotated", "ring_attention") else line)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_recompute_is_for_blocks(implementation):
    line = "an MLP stores what its backward pass needs: recompute is for a transformer's blocks"
    with pytest.raises(ValueError) as caught:
        Run(implementation, parse_axes("dp=2"), MLP, recompute="block")
    assert str(caught.value) == line
    assert Run(implementation, parse_axes("dp=2"), BLOCKS, recompute="block").recompute == "block"


def test_no_expert_takes_more_tokens_than_there_are():
    assert replace(EXPERTS, capacity_factor=1e308).capacity == replace(EXPERTS, capacity_factor=2).capacity == 8


SIZED = st.builds(
    Transformer,
    batch=st.sampled_from((4, 6, 12)),
    width=st.sampled_from((12, 24)),
    layers=st.integers(2, 4),
    sequence=st.sampled_from((8, 12, 24)),
    heads=st.sampled_from((2, 4, 12)),
    ff=st.sampled_from((6, 8, 12)),
    experts=st.sampled_from((0, 4, 12)),
)
NAMES = st.lists(st.sampled_from(ON_AXES), min_size=1, max_size=3, unique_by=ALL_AXES.get)


@given(NAMES, st.integers(2, 4), SIZED)
def test_a_transformer_that_is_allowed_gives_every_rank_equal_parts(strategies, degree, problem):
    """Of each parameter all ranks hold as much: what would not divide is refused."""
    axes = tuple(Axis(ALL_AXES[name], degree, name) for name in strategies)
    try:
        run = Run("torch", axes, problem, microbatches=1)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    sizes: dict[str, set] = {}
    for parts in layout(run):
        assert parts
        for part in parts:
            shapes = zip(names(part), part.cuts, problem.shape(part.layer), strict=True)
            for name, cuts, shape in shapes:
                held = tuple(map(length, cuts, shape))
                sizes.setdefault(name, set()).add(held)
                assert all(held), name
    assert all(len(held) == 1 for held in sizes.values()), sizes
