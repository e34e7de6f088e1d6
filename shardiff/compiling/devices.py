"""The devices of a target, which exist only for the compiler: this process's own stay as they are, started or not."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from shardiff.compiling.hardware import FAMILIES, Target, has_compiler, missing_compiler
from shardiff.ranks.jax_devices import devices, quiet_stderr

CONFIGS = Path(__file__).parent / "target_configs"
SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"  # read by jax's CUDA plugin
ACCELERATORS = ("nvidiactl", "accel0", "vfio", "kfd")  # in /dev, where the machine has a GPU or a TPU


def get(target: Target) -> list[Any]:
    """All devices of a target. Raises ValueError, one line, where there is no compiler for it."""
    if not has_compiler(target.kind):
        raise ValueError(f"{target} needs a compiler that is not installed: {missing_compiler(target.kind)}")
    return list(_loaded(target))


@functools.cache
def _loaded(target: Target) -> list[Any]:
    _quiet_plugins()
    with quiet_stderr():
        return _devices(target)


def _devices(target: Target) -> list[Any]:
    if target.kind == "cpu":
        return _cpu_devices(target.num_devices)
    from jax.experimental.topologies import get_topology_desc

    if target.kind == "gpu":
        hosts, gpus = target.shape if len(target.shape) == 2 else (1, *target.shape)
        config = (CONFIGS / f"{target.name}.txtpb").read_text()
        options = {"target_config": config, "topology": f"1x{hosts}x{gpus}"}
        try:
            return get_topology_desc(str(target), platform="cuda", **options).devices
        except NotImplementedError:  # jax has started already, and dropped a plugin that found no GPU
            _register_cuda()
            return get_topology_desc(str(target), platform="cuda", **options).devices
    options = {"chip_config_name": name} if (name := FAMILIES[target.name].chip_config) else {}
    return get_topology_desc(str(target), platform="tpu", **options).devices


@functools.cache
def _cpu_devices(count: int) -> list[Any]:
    """CPU devices beside the process's own. Compile-only topologies exist for GPUs and TPUs alone.

    jaxlib's client is not public API, so where a jaxlib has it no more, the process's own devices serve.
    """
    try:
        from jaxlib.xla_client import make_cpu_client

        return make_cpu_client(num_devices=count).devices()
    except (ImportError, AttributeError, TypeError):
        import jax

        with suppress(RuntimeError):  # jax has started, which may do
            jax.config.update("jax_num_cpu_devices", count)
        return devices(count, "cpu")


def load_quietly() -> None:
    """Load the CUDA plugin's libraries, which log that there is no GPU when they are loaded; jax itself is not loaded.

    For a process in which a user's code is about to import jax, whose configuration is read when it is imported.
    """
    with quiet_stderr(), suppress(ImportError):
        import jaxlib

        for module in pkgutil.iter_modules(jaxlib.__path__):
            if module.name.startswith("gpu_"):
                with suppress(Exception):  # whatever is wrong, jax says
                    importlib.import_module(f"jaxlib.{module.name}")


def compiler_options(platform: str) -> dict[str, Any] | None:
    """What compiling for such devices takes. There is no GPU to time kernels on, nor any need: which kernel is chosen
    does not change the communication."""
    return {"xla_gpu_autotune_level": 0} if platform in ("gpu", "cuda") else None


def _register_cuda() -> None:
    """Register the CUDA plugin as jax does at its start, but without asking for a GPU's libraries."""
    before = os.environ.get(SKIP_CHECK)
    os.environ[SKIP_CHECK] = "1"
    try:
        for plugin in entry_points(group="jax_plugins"):
            if "cuda" in plugin.name:
                plugin.load().initialize()
    finally:
        os.environ.pop(SKIP_CHECK) if before is None else os.environ.update({SKIP_CHECK: before})


@functools.cache
def _quiet_plugins() -> None:
    """Load the compilers' plugins as compilers: without a log on the screen, and without a search for the hardware.

    jax reads JAX_PLATFORMS when it is imported, and its configuration when it starts; libtpu reads its variables when
    it is loaded. Where the machine has no accelerator, jax has none to start.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # compiling locks nothing that two would share
    os.environ.setdefault("TPU_LOG_DIR", "disabled")  # or libtpu leaves log files in /tmp
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with quiet_stderr():
        import jax
        from jax.experimental.topologies import get_topology_desc

        accelerated = any(Path("/dev", name).exists() for name in ACCELERATORS)
        if not accelerated and not getattr(jax.config, "jax_platforms", None):
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
            jax.config.update("jax_platforms", "cpu")
        with suppress(Exception):  # there is no such platform, but now all plugins are loaded
            get_topology_desc("none", platform="none")
