"""Which devices JAX uses, decided before it starts."""

from __future__ import annotations

import os
from pathlib import Path


def prepare(count: int, device: str = "auto") -> None:
    """Make `count` devices available; call before anything else uses jax.

    device: "cpu": the CPU split into `count` devices; "cuda"; "auto": CUDA where the machine has an NVIDIA GPU and a
    plugin for it, with CPU devices as well. Raises RuntimeError if jax has started with fewer.
    """
    has_gpu = Path("/dev/nvidiactl").exists()
    wanted = {"cpu": "cpu", "cuda": "cuda,cpu", "auto": "cuda,cpu" if has_gpu else "cpu"}[device]
    os.environ.setdefault("JAX_PLATFORMS", wanted)  # else an installed TPU compiler is started as if it were a TPU
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # else the absence of CUDA is logged
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if len(jax.devices("cpu")) < count:
            raise RuntimeError(
                f"jax has started with {len(jax.devices('cpu'))} CPU devices, {count} are needed"
            ) from None


def devices(count: int, device: str = "auto"):
    """`count` devices of one kind. Raises ValueError with both numbers if there are not as many."""
    import jax

    def of(platform: str) -> list:
        try:
            return jax.devices(platform)
        except RuntimeError:  # no such platform here
            return []

    if device != "cpu" and (device == "cuda" or len(of("cuda")) >= count):
        found, kind = of("cuda"), "CUDA GPUs"
    else:
        found, kind = of("cpu"), "CPU devices"
    if len(found) < count:
        raise ValueError(f"{count} ranks need {count} {kind}, jax has {len(found)}")
    return found[:count]
