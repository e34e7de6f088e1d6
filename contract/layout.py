"""Which part of the full model each rank holds, and what it works on. Every implementation is checked against this."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from contract import strategies
from contract.axes import Axes
from contract.kept import Kept, of_layer, of_output
from contract.problem import Problem, split_sizes
from contract.schedule import Schedule, make, parts_of
from contract.share import Part, Pass, Share, names, whole_parts
from contract.strategy import Run


@lru_cache(64)
def layout(run: Run, of: str = "parameters") -> list[list[Part]]:
    """For each rank, the parts that it holds, in the order of the layers. The innermost strategy cuts first.

    of: "parameters", "gradients", "optimizer_state"; or "use": as a rank computes with them.
    """
    return [held_by(run, rank, of) for rank in range(run.world_size)]


def held_by(run: Run, rank: int, of: str = "parameters") -> list[Part]:
    """The same for one rank, without a look at all others."""
    at = tuple(run.mesh.coordinates(rank).items())
    return _held(run.nested, run.problem, run.schedule, run.chunks, at, of)


@lru_cache(8192)
def _held(
    nested: Axes, problem: Problem, schedule: str, chunks: int, at: tuple[tuple[str, int], ...], of: str
) -> list[Part]:
    places, unit = dict(at), _unit(nested, problem)
    parts = list(whole_parts(problem))
    # A pipeline picks layers, and all others cut inside of layers: picked first, there is less to cut.
    for axis in sorted(reversed(nested), key=lambda axis: axis.strategy != "pipeline_parallel"):
        strategy, index = strategies.of(axis.strategy), places[axis.name]
        if axis.strategy == "pipeline_parallel":
            of_stage = strategy.chunks(parts, problem, axis.size, index, unit, parts_of(schedule, axis.size, chunks))
            parts = [part for chunk in of_stage for part in chunk]
        elif of in strategy.SPLITS or (of == "use" and strategy.DEPTH == 2):
            parts = strategy.cut(parts, problem, axis.size, index, unit)
    return parts


def schedule_of(run: Run) -> Schedule | None:
    """The schedule of a run's pipeline; None without one."""
    if "pipeline_parallel" not in run.strategies:
        return None
    return _schedule(run.schedule, run.size("pipeline_parallel"), run.microbatches, run.chunks)


_schedule = lru_cache(64)(make)


def chunks_of(run: Run, rank: int) -> list[list[Part]]:
    """The parts that a rank holds, by the chunks of its pipeline stage; one chunk without a pipeline."""
    held, schedule = iter(held_by(run, rank)), schedule_of(run)
    if schedule is None:
        return [list(held)]
    stage, layers = run.mesh.coordinates(rank)["pp"], list(range(run.problem.depth))
    pipeline = strategies.of("pipeline_parallel")
    sizes = pipeline.chunks(layers, run.problem, schedule.stages, stage, unit_of(run), schedule.parts)
    return [[next(held) for _ in chunk] for chunk in sizes]


def unit_of(run: Run) -> int:
    """How many consecutive layers must stay on one rank."""
    return _unit(run.axes, run.problem)


def _unit(axes: Axes, problem: Problem) -> int:
    return max(problem.unit, *(strategies.of(axis.strategy).UNIT for axis in axes), 1)


def share(run: Run, rank: int) -> Share:
    """What a rank works on in one step."""
    at = run.mesh.coordinates(rank)
    held = tuple(held_by(run, rank)), tuple(held_by(run, rank, "gradients"))
    rows = run.problem.batch
    for axis in reversed(run.nested):
        rows = strategies.of(axis.strategy).rows(rows, axis.size)[at[axis.name]]
    features = kept(run, (of_output(run.problem),))[0].elements
    program, used = (
        (run.implementation, run.gathered_again and run.recompute != "block"),
        tuple(held_by(run, rank, "use")),
    )
    if "pipeline_parallel" not in run.strategies:
        return Share(run.problem, *held, (Pass(rows),), (rows,), features, *program, sequence=tokens_of(run), used=used)
    stages, schedule = run.size("pipeline_parallel"), schedule_of(run)
    chunks = [tuple(chunk) for chunk in chunks_of(run, rank)]
    by_ticks = run.implementation != "torch" and not run.in_gpipes_order
    if run.implementation == "torch":
        microbatches = tuple(split_sizes(rows, run.microbatches))
        passes = []
        for number, chunk in enumerate(chunks):
            first = number == 0 and at["pp"] == 0  # of the model's parts
            passes += [Pass(size, not first, not first, chunk) for size in microbatches]
    elif by_ticks:  # a stage makes its own passes only, but does not know whether it is the first
        microbatches = (padded_rows(run),) * run.microbatches
        passes = [Pass(size, True, True, chunk) for chunk in chunks for size in microbatches]
    else:  # all stages run one program in every tick, on microbatches of one size; in tick 0 nothing is received yet
        microbatches = (padded_rows(run),) * run.microbatches
        ticks = run.microbatches + stages - 1
        derived = run.implementation == "annotated"
        passes = [Pass(microbatches[0], True, (derived or 0 < tick) and stages > 1) for tick in range(ticks)]
    of_pipeline = schedule, by_ticks, tokens_of(run), used
    return Share(run.problem, *held, tuple(passes), microbatches, features, *program, *of_pipeline)


def tokens_of(run: Run) -> int:
    """The tokens of a sample that a rank has inside the layers, where `cp` alone splits them."""
    return run.problem.sequence // prod(axis.size for axis in run.axes if axis.name == "cp")


def batch_shares(run: Run) -> int:
    """The number of ranks among which the rows of the batch are split."""
    return prod(n for _, n, strategy in run.axes if sum(strategies.of(strategy).rows(n, n)) == n)


def padded_rows(run: Run) -> int:
    """The rows of a microbatch in JAX, where every rank has as many as the rank with the most."""
    rows = run.problem.batch
    for axis in run.axes:
        rows = max(strategies.of(axis.strategy).rows(rows, axis.size))
    return -(-rows // run.microbatches)


def kept_of(run: Run, part: Part) -> list[Kept]:
    """What a rank keeps of a layer until its backward pass, for each sample that it works on."""
    return kept(run, of_layer(run.problem, part.layer))


@lru_cache(256)
def kept(run: Run, tensors: tuple[Kept, ...]) -> list[Kept]:
    """What a rank of `run` has of these tensors. Every rank has as much."""
    mine = list(tensors)
    for axis in reversed(run.nested):
        mine = strategies.of(axis.strategy).kept(mine, axis.size)
    return mine


def cut(params: Sequence[Any], parts: Sequence[Part]) -> list[Any]:
    """One rank's shards of the full parameters, as views."""
    return [p.cuts._make(a[cut] for a, cut in zip(params[p.layer], p.cuts, strict=True)) for p in parts]


def merge(run: Run, shards: Sequence[Sequence[Any]], of: str = "parameters") -> list[Any]:
    """The full parameters, assembled from the shards of all ranks: the inverse of `cut`.

    Where several ranks hold a replica, that of the lowest rank is taken, so the others may be None. (`Shard.digests`
    show whether replicas agree.) Raises ValueError if a shard does not have the shape that the layout gives it.
    """
    dtype = next(a.dtype for rank in shards for layer in rank for a in layer if a is not None)
    full = [layer._make(np.full(shape, np.nan, dtype) for shape in layer) for layer in run.problem.shapes()]
    for rank, (parts, owner) in enumerate(zip(layout(run, of), owned(run, of), strict=True)):
        if len(parts) != len(shards[rank]):
            raise ValueError(f"rank {rank} holds {len(shards[rank])} layers where the layout says {len(parts)}")
        for part, layer, owns in zip(parts, shards[rank], owner, strict=True):
            for name, whole, index, shard, own in zip(
                names(part), full[part.layer], part.cuts, layer, owns, strict=True
            ):
                if not own:
                    continue
                if whole[index].shape != shard.shape:
                    want = whole[index].shape
                    raise ValueError(f"rank {rank} holds {name} as {shard.shape} where the layout says {want}")
                whole[index] = shard
    return full


def owned(run: Run, of: str = "parameters") -> list[list[Any]]:
    """For each rank and part, whether it is the lowest rank that holds each parameter, as a tuple of the layer's type.

    A sum over owners counts each parameter once.
    """
    seen: set[tuple[str, str]] = set()
    flags = []
    for parts in layout(run, of):
        row = []
        for part in parts:
            keys = [(name, str(cut)) for name, cut in zip(names(part), part.cuts, strict=True)]
            row.append(part.cuts._make(key not in seen for key in keys))
            seen.update(keys)
        flags.append(row)
    return flags
