"""What tracing costs: python -m benchmarks.speed.trace_speed [PAIRS]

A training step of the default model (4 layers, width 1024, batch 128, AdamW), with and without a trace in turns on the
same ranks, by data_parallel and by tensor_parallel. A step takes as long as its slowest rank;
printed are the medians and the median of the ratios of neighbours. Then operators a second, on one process.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.documents.figures import over_ranks
from contract.axes import one_axis
from contract.problem import Problem
from contract.strategy import Run
from shardiff.ranks.torch_pool import workers
from shardiff.tracing.process import writer
from shardiff.tracing.tracer import capture
from torch_impl import train
from torch_impl.compose import loss_and_grads

STRATEGIES = ("data_parallel", "tensor_parallel")
CLOCKS, KINDS = ("by the clock", "processor time"), ("plain", "traced")
GOAL = 0.15


def steps(device: torch.device, run: Run, pairs: int, folder: str) -> dict[str, list[float]]:
    """Seconds on this rank of steps without a trace and with one, which take turns in the order of A B B A.

    By the clock, and by processor time of this thread, which tells more where other programs run. folder: for the files
    of the traces.
    """
    mesh = train.make_mesh(run, device)
    params = train.make_params(mesh, run, device)
    batch, optimizer = train.make_batch(mesh, run, 0, device), train.make_optimizer(params, run)

    def step() -> tuple[float, float]:
        dist.barrier()
        start, used = time.perf_counter(), time.thread_time()
        _, grads = loss_and_grads(params, batch, mesh, run)
        train.update(optimizer, params, grads)
        return time.perf_counter() - start, time.thread_time() - used

    for _ in range(3):
        step()
    tell = writer(folder)  # as `shardiff trace` notes each call
    taken: dict[str, list[float]] = {f"{kind} {clock}": [] for kind in KINDS for clock in CLOCKS}
    for i in range(pairs):
        for kind in KINDS[:: -1 if i % 2 else 1]:
            with capture(tell=tell) if kind == "traced" else nullcontext():
                step()
                for clock, seconds in zip(CLOCKS, step(), strict=True):
                    taken[f"{kind} {clock}"].append(seconds)
    return taken


def operators(count: int = 20_000) -> dict[str, float]:
    """Seconds of one operator on two small tensors, without a trace and with one."""
    a, b = torch.ones(4), torch.ones(4)

    def loop() -> float:
        start = time.perf_counter()
        for _ in range(count):
            torch.add(a, b)
        return (time.perf_counter() - start) / count

    loop()
    plain = min(loop() for _ in range(3))
    with capture():
        traced = min(loop() for _ in range(3))
    return {"plain": plain, "traced": traced}


def main() -> None:
    """Print the figures beside what they should not pass."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory(prefix="shardiff-") as folder, workers(ranks, "cpu", timeout=120) as pool:
            for strategy in STRATEGIES:
                run = Run("torch", one_axis(strategy, ranks), Problem())
                found: list[dict[str, Any]] = pool.call(steps, run, pairs, folder, world_size=ranks)
                for clock in CLOCKS:
                    plain, traced = (over_ranks([rank[f"{kind} {clock}"] for rank in found]) for kind in KINDS)
                    ratio = statistics.median(b / a for a, b in zip(plain, traced, strict=True)) - 1
                    times = " and ".join(f"{1e3 * statistics.median(each):.1f}" for each in (plain, traced))
                    what = f"{strategy} on {ranks} ranks, {clock}: {times} ms"
                    print(f"{what}; {ratio:.1%} more with a trace (goal: {GOAL:.0%})", flush=True)
    one = operators()
    print(f"an operator: {1e6 * one['plain']:.2f} and {1e6 * one['traced']:.2f} us")


if __name__ == "__main__":
    main()
