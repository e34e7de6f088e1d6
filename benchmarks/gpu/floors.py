"""Floors: what a copy takes, and what a collective takes that has nobody to talk to."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.collectives.collectives import on_jax, on_torch
from benchmarks.collectives.timing import whole
from benchmarks.documents.collectives import OPS
from benchmarks.gpu import cuda
from benchmarks.gpu.sizes import Sizes
from benchmarks.pools import workers
from shardiff.ranks.verdict import WorkerError

TIMEOUT = 30.0
BUDGET = 0.1  # seconds for each size of a collective


def measure(sizes: Sizes, keep: Any) -> None:
    """Copies in the device's memory and to and from the host's, then every collective of one rank in torch and JAX."""
    rows: list[dict[str, Any]] = []
    for row in copies(sizes):
        rows.append(row)
        keep({"floors": rows})
    failed: list[WorkerError] = []
    for framework in ("torch", "jax"):
        try:
            rows += collectives(framework, sizes)
        except WorkerError as error:  # the other framework's are measured all the same
            failed.append(error)
        keep({"floors": rows})
    if failed:
        raise failed[0]


def copies(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """A row for each kind of copy and size; a copy within the device counts what it reads and what it writes."""
    import torch

    device = cuda.torch_device(sizes.device)
    for size in sizes.copies:
        source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        host = cuda.host_bytes(sizes.device, size)
        kinds = {
            "copy": (partial(target.copy_, source), 2),
            "host to device": (partial(target.copy_, host, non_blocking=True), 1),
            "device to host": (partial(host.copy_, source, non_blocking=True), 1),
        }
        for name, (act, factor) in kinds.items():
            seconds = statistics.median(cuda.timed(sizes.device, act, max(3, sizes.iterations), 2))
            yield floor("torch", name, size, seconds, factor * size)


def collectives(framework: str, sizes: Sizes) -> list[dict[str, Any]]:
    """A row for each collective and size, of a process group of one rank. Raises WorkerError."""
    payloads = tuple(whole(size, 1) for size in sizes.payloads)
    every = torch_collectives if framework == "torch" else jax_collectives
    with workers(framework, 1, sizes.device, TIMEOUT) as pool:
        (measured,) = pool.call(every, payloads, sizes.iterations)
    return [
        floor(framework, op, each["bytes"], statistics.median(each["amortized"]), each["bytes"])
        for op, blocks in measured.items()
        for each in blocks
    ]


def torch_collectives(device: Any, payloads: Sequence[int], iterations: int) -> dict[str, Any]:
    """What a rank of torch measures of each collective; started once for all."""
    return {op: on_torch(device, "block", op, payloads, iterations, BUDGET, False) for op in OPS}


def jax_collectives(payloads: Sequence[int], iterations: int) -> dict[str, Any]:
    """The same of a rank of JAX."""
    return {op: on_jax("block", op, payloads, iterations, BUDGET, False) for op in OPS}


def floor(framework: str, op: str, size: int, seconds: float, moved: int) -> dict[str, Any]:
    """One row. moved: bytes by which the rate is counted."""
    return {
        "framework": framework,
        "op": op,
        "bytes": size,
        "seconds": seconds,
        "bytes_per_second": moved / max(seconds, 1e-9),
    }
