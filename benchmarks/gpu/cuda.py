"""The few calls of CUDA that this package makes by itself; a test that has no GPU replaces them here.

device: "cuda", or "cpu" for a rehearsal, in which time is that of the host and memory is not known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shardiff.system.machine import gpu_properties


def torch_device(device: str) -> Any:
    """torch's device: the first GPU, or the CPU."""
    import torch

    if device == "cuda":
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    return torch.device("cpu")


def facts(device: str) -> dict[str, Any]:
    """The GPU's name, memory and driver, and the versions of CUDA that torch was built for and that the driver has."""
    if device != "cuda":
        return {}
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda_of_torch": torch.version.cuda,
        "nccl_of_torch": ".".join(map(str, torch.cuda.nccl.version())),  # pyright: ignore[reportAttributeAccessIssue]
        **gpu_properties("driver_version"),
    }


def timed(device: str, act: Callable[[], Any], iterations: int, warmup: int) -> list[float]:
    """Seconds of each of `iterations` calls of `act` in torch, after `warmup` that are not timed.

    On a GPU by events, so that the host's own time counts only where it holds the GPU up.
    """
    if device != "cuda":
        seconds = []
        for _ in range(warmup + iterations):
            start = time.perf_counter()
            act()
            seconds.append(time.perf_counter() - start)
        return seconds[warmup:]
    import torch

    for _ in range(warmup):
        act()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        act()
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in zip(marks, marks[1:], strict=False)]


def host_bytes(device: str, size: int) -> Any:
    """Memory of the host as a tensor, pinned where a GPU copies from it."""
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")


def forget_peak(device: str) -> None:
    """Count the most memory in use from now on, and give back what is not in use."""
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: str) -> int | None:
    """The most memory that torch's tensors had in use since `forget_peak`; None on the CPU."""
    if device != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_allocated()


def jax_peak_bytes(jax_device: Any) -> int | None:
    """The most memory that jax's arrays had in use since the process began; None where jax does not say."""
    return (jax_device.memory_stats() or {}).get("peak_bytes_in_use")
