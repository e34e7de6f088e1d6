"""The axes of a run's mesh, and the strategy of each."""

from __future__ import annotations

from typing import NamedTuple

from shardiff.mesh import parse as parse_mesh

CORE = ("data_parallel", "tensor_parallel", "megatron_tensor_parallel", "pipeline_parallel")  # the lecture's
STRATEGIES = (*CORE, "fully_sharded", "zero1", "zero2")
AXES = {
    "single_device": None,
    "data_parallel": "dp",
    "tensor_parallel": "tp",
    "megatron_tensor_parallel": "tp",
    "pipeline_parallel": "pp",
    "fully_sharded": "fsdp",
    "zero1": "fsdp",
    "zero2": "fsdp",
}
AXES_OF_BLOCKS = {  # of strategies that only blocks of a transformer have
    "sequence_parallel": "tp",
    "context_parallel": "cp",
    "ring_attention": "cp",
    "ulysses": "cp",
    "expert_parallel": "ep",
}
ALL_AXES = AXES | AXES_OF_BLOCKS
STRATEGIES_OF_BLOCKS = (*(name for name in STRATEGIES if name != "tensor_parallel"), *AXES_OF_BLOCKS)
ON_AXES = tuple(name for name in ALL_AXES if ALL_AXES[name])
USUAL = {  # axis -> default
    "dp": "data_parallel",
    "fsdp": "fully_sharded",
    "tp": "megatron_tensor_parallel",
    "pp": "pipeline_parallel",
}
ALL_USUAL = USUAL | {"cp": "ring_attention", "ep": "expert_parallel"}


class Axis(NamedTuple):
    """One axis of a run's mesh: for example `dp` with 4 ranks, used by data_parallel."""

    name: str
    size: int
    strategy: str


Axes = tuple[Axis, ...]  # outermost first


def one_axis(strategy: str, size: int) -> Axes:
    """The axes of a run of one strategy; none for single_device."""
    if strategy not in ALL_AXES:
        raise ValueError(f"unknown strategy {strategy!r}; known: {', '.join(ALL_AXES)}")
    if (name := ALL_AXES[strategy]) is not None:
        return (Axis(name, size, strategy),)
    if size != 1:
        raise ValueError(f"single_device runs on 1 rank, got degree {size}")
    return ()


def parse_axes(mesh: str, strategies: tuple[str, ...] = ()) -> Axes:
    """The axes of a mesh such as `dp=2,tp=4`. strategies: for axes that should not have their usual one (ALL_USUAL).

    Raises ValueError with one line that says what is wrong and what would be right.
    """
    chosen = dict(ALL_USUAL)
    for strategy in strategies:
        if strategy not in ALL_AXES or (axis := ALL_AXES[strategy]) is None:
            raise ValueError(f"unknown strategy {strategy!r} for a mesh; known: {', '.join(ON_AXES)}")
        chosen[axis] = strategy
    sizes = parse_mesh(mesh).axes
    for name, _ in sizes:
        if name not in ALL_USUAL:
            raise ValueError(f"unknown axis {name!r} in the mesh {mesh!r}; known: {', '.join(ALL_USUAL)}")
    names = [name for name, _ in sizes]
    for strategy in strategies:
        if ALL_AXES[strategy] not in names:
            raise ValueError(f"{strategy} needs the axis {ALL_AXES[strategy]}, which the mesh {mesh!r} does not have")
    return tuple(Axis(name, size, chosen[name]) for name, size in sizes)
