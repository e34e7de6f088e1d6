"""Every strategy against the single-device reference, on the GPU: by itself, and with several ranks that share it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.check import KEYS, Row, described, single_device, to_json
from benchmarks.gpu.sizes import Sizes, alone, alone_blocks, shared, shared_blocks
from contract import reference
from contract.axes import Axes
from contract.problem import Problem
from contract.proof import prove
from contract.strategy import Run, RunResult
from contract.transformer import Transformer
from shardiff.ranks.rank import report_phase, report_progress
from shardiff.ranks.supervisor import Workers
from shardiff.ranks.verdict import WorkerError

BEFORE_FORK = ("torch_impl.train", "torch._dynamo")  # of ranks on the CPU

Keep = Callable[[dict[str, Any]], None]
Add = Callable[[Run, RunResult | str, float], None]  # told of each run: its result or what went wrong, and seconds
TIMEOUT = 60.0  # seconds of silence


def torch_alone(sizes: Sizes, keep: Keep) -> None:
    """torch, one rank, with the backend that the device has."""
    todo = [*runs("torch", alone(), sizes), *runs_of_blocks("torch", alone_blocks(), sizes)]
    run_torch(todo, sizes.device, False, judge(keep))


def torch_shared(sizes: Sizes, keep: Keep) -> None:
    """torch, 2 and 4 ranks on one device, whose collectives go through the host."""
    todo = [*runs("torch", shared(), sizes), *runs_of_blocks("torch", shared_blocks(), sizes)]
    run_torch(todo, sizes.device, True, judge(keep))


def shard_map(sizes: Sizes, keep: Keep) -> None:
    """JAX's shard_map, one rank."""
    todo = [*runs("shard_map", alone(), sizes), *runs_of_blocks("shard_map", alone_blocks(), sizes)]
    run_jax(todo, sizes.device, judge(keep))


def annotated(sizes: Sizes, keep: Keep) -> None:
    """JAX with annotations alone, one rank."""
    todo = [*runs("annotated", alone(), sizes), *runs_of_blocks("annotated", alone_blocks(), sizes)]
    run_jax(todo, sizes.device, judge(keep))


def runs(implementation: str, axes: Sequence[Axes], sizes: Sizes) -> list[Run]:
    """The runs in order of value: one dtype after the other, the single device first, which bfloat16 is held to.

    Every stage has a layer.
    """
    found = []
    for dtype in sizes.dtypes:
        for each in axes:
            if left_out(each, dtype, sizes) and not sizes.every_dtype:
                continue
            problem = replace(sizes.proof, dtype=dtype, layers=max(sizes.proof.layers, stages(each)))
            found += with_single_device(implementation, each, problem, sizes)
    return list(dict.fromkeys(found))


def runs_of_blocks(implementation: str, axes: Sequence[Axes], sizes: Sizes) -> list[Run]:
    """The same for the transformer: all in the first dtype, and in the others the single device and the meshes.

    Which expert a token goes to is a comparison, which rounding may turn: experts run in the first dtype alone. No
    annotation derives a ring. There are as many blocks as stages.
    """
    found = []
    for dtype in sizes.dtypes:
        for each in axes:
            names = [axis.strategy for axis in each]
            if left_out(each, dtype, sizes) or implementation == "annotated" and "ring_attention" in names:
                continue
            plain = replace(sizes.proof_blocks, dtype=dtype, layers=stages(each))
            problem = replace(plain, experts=4) if "expert_parallel" in names else plain
            found += with_single_device(implementation, each, problem, sizes)
    return list(dict.fromkeys(found))


def left_out(axes: Axes, dtype: str, sizes: Sizes) -> bool:
    """Whether it is a single strategy, in another dtype than the first."""
    return len(axes) == 1 and dtype != sizes.dtypes[0]


def stages(axes: Axes) -> int:
    """The number of a pipeline's stages; 1 without one."""
    return {axis.name: axis.size for axis in axes}.get("pp", 1)


def with_single_device(implementation: str, axes: Axes, problem: Problem, sizes: Sizes) -> tuple[Run, Run]:
    """The run of a single device, and the one over `axes`."""
    run = Run(implementation, axes, problem, steps=2, microbatches=2 if axes else 1, device=sizes.device)
    return single_device(run, implementation, problem.dtype), run


def judge(keep: Keep) -> Add:
    """A function that holds a result to the reference, and keeps the rows after each."""
    wants: dict[Run, RunResult] = {}
    own: dict[Problem, RunResult] = {}
    rows: list[dict[str, Any]] = []

    def add(run: Run, got: RunResult | str, seconds: float) -> None:
        dtype, key = run.problem.dtype, single_device(run, "torch", "float64")
        if key not in wants:
            wants[key] = reference.run(key)
        if isinstance(got, RunResult) and not run.axes:
            own[run.problem] = got
        if isinstance(got, RunResult) and (dtype != "bfloat16" or run.problem in own):
            row = Row(run, prove(run, got, wants[key], own.get(run.problem) if dtype == "bfloat16" else None))
            rows.append({**to_json(row), "failures": list(row.proof.failures), "seconds": seconds})
        else:
            failure = got if isinstance(got, str) else "the single-device run that it is held to has failed"
            rows.append({**failed(run), "failures": [failure], "seconds": seconds})
        rows[-1]["model"] = model_of(run.problem)
        keep({"proofs": rows})

    return add


def model_of(problem: Problem) -> str:
    """What rows call the model."""
    if not isinstance(problem, Transformer):
        return "MLP"
    return "transformer with experts" if problem.experts else "transformer"


def failed(run: Run) -> dict[str, Any]:
    """The row of a run that has no result."""
    return {
        **described(run),
        **dict.fromkeys(KEYS.values()),
        "passed": False,
    }


def run_jax(todo: Sequence[Run], device: str, add: Add) -> None:
    """Every run in this process. One that fails does not end the others."""
    from shardiff.ranks import jax_devices

    jax_devices.prepare(1, device)
    from jax_impl import train

    for run in todo:
        start = time.perf_counter()
        try:
            got: RunResult | str = train.run(run)
        except Exception:
            got = traceback.format_exc()
        add(run, got, time.perf_counter() - start)


def run_torch(todo: Sequence[Run], device: str, staged: bool, add: Add) -> None:
    """Every run, in ranks that are started once for all runs of one size: to start CUDA takes longer than a run.

    A run that fails ends its ranks, and those after it get new ones.
    """
    from shardiff.ranks.torch_pool import workers

    with workers(max(run.world_size for run in todo), device, TIMEOUT, staged) as pool:
        for ranks in sorted({run.world_size for run in todo}):
            left = [run for run in todo if run.world_size == ranks]
            while left:
                left = left[until_failure(pool, left, ranks, add) :]


def until_failure(pool: Workers, todo: Sequence[Run], ranks: int, add: Add) -> int:
    """The runs one after the other, until one fails; how many there were."""
    from torch_impl import train

    results: list[list[Any]] = [[] for _ in todo]
    done, since = 0, time.perf_counter()

    def told(rank: int, content: tuple[int, Any]) -> None:
        nonlocal done, since
        index, result = content
        results[index].append((rank, result))
        if len(results[index]) < ranks:
            return
        in_order = [each for _, each in sorted(results[index], key=lambda one: one[0])]
        try:
            got: RunResult | str = train.assemble(todo[index], in_order)
        except AssertionError as error:
            got = str(error)
        results[index].clear()
        now = time.perf_counter()
        done, since, seconds = done + 1, now, now - since
        add(todo[index], got, seconds)

    try:
        pool.call(train_each, tuple(todo), world_size=ranks, on_progress=told)
    except WorkerError as error:
        if done == len(todo):
            raise  # after the last run
        add(todo[done], str(error).strip(), time.perf_counter() - since)
        return done + 1
    return done


def train_each(device: Any, todo: Sequence[Run]) -> None:
    """What a rank runs: train each, and tell the result."""
    from torch_impl import train

    for index, run in enumerate(todo):
        report_phase("start-up")
        report_progress((index, train.train(device, run)))
