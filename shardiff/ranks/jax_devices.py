"""Which devices JAX uses, which must be decided before it starts."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any


def prepare(count: int, device: str = "auto") -> None:
    """Make `count` devices available; to be called before anything else uses jax.

    device: "cpu" splits the CPU into `count` devices; "cuda" uses the GPUs; "auto" uses CUDA if the machine has an
    NVIDIA GPU and jax its plugin, and has CPU devices as well. Raises RuntimeError if jax has started with fewer
    devices, or if it was told to use CUDA and cannot.
    """
    has_gpu = Path("/dev/nvidiactl").exists() and any("cuda" in e.name for e in entry_points(group="jax_plugins"))
    wanted = {"cpu": "cpu", "cuda": "cuda,cpu", "auto": "cuda,cpu" if has_gpu else "cpu"}[device]
    # Compilers for absent hardware are plugins too, which jax would start as if the hardware were there.
    os.environ.setdefault("JAX_PLATFORMS", wanted)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault(
        "ALLOW_MULTIPLE_LIBTPU_LOAD", "1"
    )  # a process that only compiles needs no lock on the hardware
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if not has_gpu:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    with quiet_stderr():
        import jax

        with suppress(RuntimeError):  # jax has started, which is fine if it has enough devices
            jax.config.update("jax_num_cpu_devices", count)
        try:
            found = len(jax.devices("cpu"))
        except RuntimeError:
            if device == "cuda":
                raise
            jax.config.update("jax_platforms", "cpu")  # a plugin without its libraries
            found = len(jax.devices("cpu"))
    if found < count:
        raise RuntimeError(f"jax has started with {found} CPU devices, {count} are needed")


def devices(count: int, device: str = "auto") -> list[Any]:
    """`count` devices of one kind. Raises ValueError, with both numbers, if there are fewer."""
    import jax

    def of(platform: str) -> list[Any]:
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


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keep what compilers and plugins log in C++ off the user's screen. If the block raises an error, it is shown."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        except Exception:  # but not Ctrl-C, which the log would not explain
            log.seek(0)
            os.write(saved, log.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
