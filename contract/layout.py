"""Which part of the full model each rank holds, and what it works on. Every implementation is checked against this."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np

from contract import strategies
from contract.problem import Layer, Problem, split_sizes
from contract.schedule import Schedule, make, parts_of
from contract.share import WHOLE, Kept, Part, Pass, Share
from contract.strategy import Axes, Run


@lru_cache(64)
def layout(run: Run, of: str = "parameters") -> list[list[Part]]:
    """For each rank, the parts that it holds, in the order of the layers. The innermost strategy cuts first.

    of: "parameters", "gradients" or "optimizer_state".
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
    places, unit = dict(at), _unit(nested)
    parts = [Part(i, (WHOLE, WHOLE), (WHOLE,)) for i in range(problem.layers)]
    # A pipeline picks layers, and all others cut inside of layers: picked first, there is less to cut.
    for axis in sorted(reversed(nested), key=lambda axis: axis.strategy != "pipeline_parallel"):
        strategy, index = strategies.of(axis.strategy), places[axis.name]
        if axis.strategy == "pipeline_parallel":
            of_stage = strategy.chunks(parts, problem, axis.size, index, unit, parts_of(schedule, axis.size, chunks))
            parts = [part for chunk in of_stage for part in chunk]
        elif of in strategy.SPLITS:
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
    stage, layers = run.mesh.coordinates(rank)["pp"], list(range(run.problem.layers))
    pipeline = strategies.of("pipeline_parallel")
    sizes = pipeline.chunks(layers, run.problem, schedule.stages, stage, unit_of(run), schedule.parts)
    return [[next(held) for _ in chunk] for chunk in sizes]


def unit_of(run: Run) -> int:
    """How many consecutive layers must stay on one rank."""
    return _unit(run.axes)


def _unit(axes: Axes) -> int:
    return max((strategies.of(axis.strategy).UNIT for axis in axes), default=1)


def share(run: Run, rank: int) -> Share:
    """What a rank works on in one step."""
    at = run.mesh.coordinates(rank)
    held = tuple(held_by(run, rank)), tuple(held_by(run, rank, "gradients"))
    rows = run.problem.batch
    for axis in reversed(run.nested):
        rows = strategies.of(axis.strategy).rows(rows, axis.size)[at[axis.name]]
    _, features = kept(run, rank)
    program = run.implementation, run.gathered_again
    if "pipeline_parallel" not in run.strategies:
        return Share(run.problem, *held, (Pass(rows),), (rows,), int(features), *program)
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
    return Share(run.problem, *held, tuple(passes), microbatches, int(features), *program, schedule, by_ticks)


def batch_shares(run: Run) -> int:
    """The number of ranks among which the rows of the batch are split."""
    return prod(n for _, n, strategy in run.axes if sum(strategies.of(strategy).rows(n, n)) == n)


def padded_rows(run: Run) -> int:
    """The rows of a microbatch in JAX, where every rank has as many as the rank with the most."""
    rows = run.problem.batch
    for axis in run.axes:
        rows = max(strategies.of(axis.strategy).rows(rows, axis.size))
    return -(-rows // run.microbatches)


def kept(run: Run, rank: int) -> tuple[list[Kept], float]:
    """Elements per row that each layer of a rank keeps for its backward pass, and those of the loss's residual.

    Every layer is counted as one in the middle of the model; `contract.memory` corrects for the first and the last
    layer.
    """
    width = run.problem.width
    layers, residual = [Kept(width, width) for _ in held_by(run, rank)], float(width)
    for axis in reversed(run.nested):
        layers, residual = strategies.of(axis.strategy).kept(layers, residual, axis.size)
    return layers, residual


def names(part: Part) -> tuple[str, str]:
    """The names of a part's two parameters: w3, b3."""
    return f"w{part.layer}", f"b{part.layer}"


def cut(params: Sequence[Layer], parts: Sequence[Part]) -> list[Layer]:
    """One rank's shards of the full parameters, as views."""
    return [Layer(params[p.layer].w[p.w], params[p.layer].b[p.b]) for p in parts]


def merge(run: Run, shards: Sequence[Sequence[Layer]], of: str = "parameters") -> list[Layer]:
    """The full parameters, assembled from the shards of all ranks: the inverse of `cut`.

    Where several ranks hold a replica, that of the lowest rank is taken, so the others may be None. (`Shard.digests`
    show whether replicas agree.) Raises ValueError if a shard does not have the shape that the layout gives it.
    """
    d, dtype = run.problem.width, next(a.dtype for rank in shards for layer in rank for a in layer if a is not None)
    full = [Layer(np.full((d, d), np.nan, dtype), np.full(d, np.nan, dtype)) for _ in range(run.problem.layers)]
    for rank, (parts, owner) in enumerate(zip(layout(run, of), owned(run, of), strict=True)):
        if len(parts) != len(shards[rank]):
            raise ValueError(f"rank {rank} holds {len(shards[rank])} layers where the layout says {len(parts)}")
        for part, layer, owns in zip(parts, shards[rank], owner, strict=True):
            for name, whole, index, shard, own in zip(
                names(part), full[part.layer], part[1:], layer, owns, strict=True
            ):
                if not own:
                    continue
                if whole[index].shape != shard.shape:
                    want = whole[index].shape
                    raise ValueError(f"rank {rank} holds {name} as {shard.shape} where the layout says {want}")
                whole[index] = shard
    return full


def owned(run: Run, of: str = "parameters") -> list[list[tuple[bool, bool]]]:
    """For each rank and part, whether it is the lowest rank that holds (w, b). A sum over owners counts each once."""
    seen: set[tuple[str, str]] = set()
    flags = []
    for parts in layout(run, of):
        row = []
        for part in parts:
            keys = [(name, str(index)) for name, index in zip(names(part), part[1:], strict=True)]
            row.append((keys[0] not in seen, keys[1] not in seen))
            seen.update(keys)
        flags.append(row)
    return flags
