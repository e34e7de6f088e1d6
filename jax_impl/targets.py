"""Compile a training step for hardware that need not be there: `compile(Run, Target) -> Compiled`.

A target is a name and a size: `cpu:8` devices, `h100:8` GPUs of one host or `h100:2x8` hosts x GPUs, `v5e:2x4` chips of
a TPU slice. XLA compiles for a description of the hardware (TPUs: the compiler's own; GPUs: `target_configs/`), and the
step is lowered from shapes and shardings alone: no array is made, so a slice of 1,024 chips costs what one of 8 does.
jax is imported only when something is compiled, after `devices.prepare` has decided how it starts.
"""

from __future__ import annotations

import functools
import math
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from contract.problem import Batch, Layer
from contract.strategy import Run
from jax_impl.devices import devices, prepare, quiet_stderr

PRECISIONS = ("default", "highest")
CONFIGS = Path(__file__).parent / "target_configs"
TPU_PAPER = "Jouppi et al., CACM 63(7), 2020"
GIB = 2**30


@dataclass(frozen=True)
class Family:
    """One kind of hardware. memory (bytes), memory_bandwidth (bytes/s), link: of one GPU or TPU chip, empty for a CPU.
    chip_config: how a TPU chip's cores make devices, where libtpu's default is not what jax runs with."""

    kind: str
    examples: tuple[str, ...]
    memory: int = 0
    memory_bandwidth: float = 0
    link: str = ""
    source: str = ""
    devices_per_chip: int = 1
    chip_config: str = ""
    most_devices: int = 32_768


def gpu(name: str, memory: int, memory_bandwidth: float, link: str) -> Family:
    source = f"NVIDIA {name.upper()} datasheet"
    return Family("gpu", (f"{name}:8", f"{name}:2x8"), memory, memory_bandwidth, f"{link} GB/s both ways", source)


def tpu(examples: str, memory: int, memory_bandwidth: float, ici: int, **more: Any) -> Family:
    more = {"source": "Google Cloud TPU documentation", **more}
    return Family("tpu", tuple(examples.split()), memory, memory_bandwidth, f"ICI, {ici} GB/s both ways", **more)


FAMILIES = {
    "cpu": Family("cpu", ("cpu:8",), most_devices=1024),
    "a100": gpu("a100", 80 * GIB, 2.039e12, "NVLink 3, 600"),
    "h100": gpu("h100", 80 * GIB, 3.35e12, "NVLink 4, 900"),
    "h200": gpu("h200", 141 * GIB, 4.8e12, "NVLink 4, 900"),
    "b200": gpu("b200", 192 * 10**9, 8e12, "NVLink 5, 1800"),
    "v2": tpu("v2:2x2 v2:4x4", 16 * GIB, 7e11, 496, devices_per_chip=2, source=TPU_PAPER),
    "v3": tpu("v3:2x2 v3:4x4", 32 * GIB, 9e11, 656, devices_per_chip=2, source=TPU_PAPER),
    # megacore: both cores of a chip are one device, as they are when jax runs on a v4
    "v4": tpu("v4:2x2x1 v4:4x4x4", 32 * GIB, 1.2e12, 600, chip_config="megacore"),
    "v5e": tpu("v5e:2x4 v5e:16x16", 16 * GIB, 8.19e11, 400),
    "v5p": tpu("v5p:2x2x2 v5p:8x8x16", 95 * GIB, 2.765e12, 1200),
    "v6e": tpu("v6e:2x4 v6e:16x16", 32 * GIB, 1.638e12, 800),
    "tpu7x": tpu("tpu7x:2x2x1 tpu7x:4x4x4", 192 * GIB, 7.38e12, 1200, devices_per_chip=2),
}


@dataclass(frozen=True)
class Target:
    """Hardware to compile for. shape: the numbers of the size as written; num_devices: as jax counts devices."""

    name: str
    kind: str
    shape: tuple[int, ...]
    num_devices: int

    def __str__(self) -> str:
        return f"{self.name}:{'x'.join(map(str, self.shape))}"


@dataclass(frozen=True)
class Memory:
    """What one device needs, in bytes, as the compiler has planned it. aliased: of outputs, what reuses arguments."""

    arguments: int
    outputs: int
    temporaries: int
    generated_code: int
    aliased: int


@dataclass(frozen=True)
class Compiled:
    """A compiled step: its optimized HLO text, its memory and flops (None where not counted) per device, and the
    seconds that it took to lower and compile."""

    run: Run
    target: Target
    hlo: str
    memory: Memory
    flops: float | None
    seconds: float


@dataclass(frozen=True)
class Known:
    """A row of `known()`. compiler: installed here; attached: CPU cores, GPUs of that name, None if not looked for."""

    name: str
    family: Family
    compiler: bool
    attached: int | None


def parse(text: str) -> Target:
    """`h100:2x8` as a Target. Raises ValueError, one line: what is wrong and what would be right."""
    name, _, size = text.partition(":")
    if name not in FAMILIES:
        raise ValueError(f"unknown target {name!r}; known: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    such_as = f"such as {' or '.join(family.examples)}"
    if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})*", size):
        raise ValueError(f"target {text!r} needs a size, {such_as}")
    shape = tuple(map(int, size.split("x")))
    if len(shape) not in (lengths := [example.count("x", len(name)) + 1 for example in family.examples]):
        right = " or ".join(map(str, sorted(set(lengths))))
        raise ValueError(f"a size of {name} has {right} numbers, {text!r} has {len(shape)}; {such_as}")
    if 0 in shape:
        raise ValueError(f"every number in a target's size must be at least 1, got {text!r}; {such_as}")
    if family.kind == "tpu" and (shape[0] % 2 or shape[1] % 2):
        works = Target(name, "tpu", (*(n + n % 2 for n in shape[:2]), *shape[2:]), 0)
        raise ValueError(f"a host of {name} has 2x2 chips, so the first two numbers must be even: {works}, not {text}")
    target = Target(name, family.kind, shape, math.prod(shape) * family.devices_per_chip)
    if target.num_devices > family.most_devices:
        raise ValueError(f"{text} has {target.num_devices} devices, {name} at most {family.most_devices}; {such_as}")
    return target


def known() -> list[Known]:
    """Every family of targets, and what of it is here."""
    gpus = [path.read_text() for path in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    attached = {name: sum(bool(re.search(rf"\b{name}\b", gpu, re.I)) for gpu in gpus) for name in FAMILIES}
    here = {"cpu": lambda name: os.cpu_count(), "gpu": attached.get, "tpu": lambda name: None}
    return [Known(n, f, has_compiler(f.kind), here[f.kind](n)) for n, f in FAMILIES.items()]


def has_compiler(kind: str) -> bool:
    """Whether the compiler for a kind of target is installed. The CPU's comes with jax."""
    if kind == "tpu":
        return find_spec("libtpu") is not None
    return kind == "cpu" or any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins"))


def compile(run: Run, target: Target, precision: str = "default", update: bool = False) -> Compiled:
    """Compile the loss and the gradients of `run` for the first `run.degree` devices of `target`.

    precision: of matrix products, "default" (what a plain jit compiles to) or "highest" (what `train` runs). update:
    the whole step, with the optimizer's update. Raises ValueError, one line, for what cannot be compiled.
    """
    return compile_all([(run, target)], precision, update)[0]


def compile_all(jobs: Sequence[tuple[Run, Target]], precision: str = "default", update: bool = False) -> list[Compiled]:
    """`compile` for many, in their order, TPU targets beside the others. Not to be called from two threads at once.

    jax is started on the CPU alone if it has not started; to run on GPUs as well, `devices.prepare` first.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; known: {', '.join(PRECISIONS)}")
    for run, target in jobs:
        if run.implementation == "torch":
            raise ValueError("torch is traced, not compiled; to compile: shard_map, annotated")
        if run.degree > target.num_devices:
            raise ValueError(f"{run.degree} ranks need {run.degree} devices, {target} has {target.num_devices}")
        if not has_compiler(target.kind):
            raise ValueError(f'{target} needs a compiler that is not installed: pip install "shardiff[compilers]"')
    cpus = {target for _, target in jobs if target.kind == "cpu"}
    with suppress(RuntimeError):  # jax has started with fewer, which may do
        prepare(max([64, *(target.num_devices for target in cpus)]), "cpu")  # 64: a later call may need more
    for target in cpus:
        target_devices(target)  # raises ValueError where they are too few

    # TPU programs one by one: libtpu's code generator for SparseCores overflows its stack where two run at once.
    with quiet_stderr(), ThreadPoolExecutor(1) as tpus, ThreadPoolExecutor(1) as others:
        pools = [tpus if target.kind == "tpu" else others for _, target in jobs]
        futures = [p.submit(compile_one, *job, precision, update) for p, job in zip(pools, jobs, strict=True)]
        try:
            wait(futures)
        finally:  # after Ctrl-C, the rest is not compiled
            for future in futures:
                future.cancel()
    return [future.result() for future in futures]


def compile_one(run: Run, target: Target, precision: str, update: bool) -> Compiled:
    """Lower and compile one."""
    import jax

    from jax_impl.train import make_mesh

    start = time.perf_counter()
    x64, highest = run.problem.dtype == "float64", "highest" if precision == "highest" else None
    # There is no GPU to try kernels on, and no need to: which one is chosen does not change the communication.
    options = {"xla_gpu_autotune_level": 0} if target.kind == "gpu" else None
    with jax.enable_x64(x64), jax.default_matmul_precision(highest):
        try:
            compiled = lower(run, make_mesh(run, target_devices(target)[: run.degree]), update).compile(options)
        except (jax.errors.JaxRuntimeError, NotImplementedError, AssertionError) as e:
            n, line = run.degree, str(e).strip().partition("\n")[0]
            if n < target.num_devices and target.kind == "tpu":
                raise ValueError(f"{n} of the {target.num_devices} devices of {target} make no slice: {line}") from e
            raise ValueError(f"the compiler for {target} refuses {run.strategy} on {n} devices: {line}") from e
        plan, flops = compiled.memory_analysis(), (compiled.cost_analysis() or {}).get("flops")
        kinds = ("argument", "output", "temp", "generated_code", "alias")
        memory = Memory(*(getattr(plan, f"{kind}_size_in_bytes") for kind in kinds))
        return Compiled(run, target, compiled.as_text(), memory, flops, time.perf_counter() - start)


@functools.cache
def target_devices(target: Target) -> list[Any]:
    """The devices of a target: this machine's for a CPU, else devices that exist only for the compiler."""
    from jax.experimental.topologies import get_topology_desc

    if target.kind == "cpu":
        return devices(target.num_devices, "cpu")
    if target.kind == "gpu":
        hosts, gpus = target.shape if len(target.shape) == 2 else (1, *target.shape)
        config = (CONFIGS / f"{target.name}.txtpb").read_text()
        options = {"target_config": config, "topology": f"1x{hosts}x{gpus}"}
        return get_topology_desc(str(target), platform="cuda", **options).devices
    os.environ.setdefault("TPU_LOG_DIR", "disabled")  # or libtpu leaves log files in /tmp
    options = {"chip_config_name": name} if (name := FAMILIES[target.name].chip_config) else {}
    return get_topology_desc(str(target), platform="tpu", **options).devices


def lower(run: Run, mesh: Any, update: bool) -> Any:
    """The step as `train` compiles it, lowered for `mesh` from shapes: loss and gradients, or all of it."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from jax_impl.train import load, make_optimizer, make_step, state_shardings

    strategy = load(run)
    params, batch = shapes(strategy, mesh, run)
    of_params, whole = jax.tree.map(lambda p: p.sharding, params), NamedSharding(mesh, PartitionSpec())
    if not update:

        def loss_and_grads(params: list[Layer], batch: Batch) -> tuple[Any, list[Layer]]:
            return strategy.loss_and_grads(params, batch, mesh, run)

        return jax.jit(loss_and_grads, out_shardings=(whole, of_params)).lower(params, batch)
    optimizer = make_optimizer(run)
    of_state = state_shardings(optimizer, params, mesh)
    state = with_shardings(jax.eval_shape(optimizer.init, params), of_state)
    step, out_shardings = make_step(strategy, mesh, run, optimizer), (whole, of_params, of_params, of_state)
    return jax.jit(step, out_shardings=out_shardings, donate_argnums=(0, 1)).lower(params, state, batch)


def shapes(strategy: Any, mesh: Any, run: Run) -> tuple[list[Layer], Batch]:
    """The shapes, dtypes and shardings of what the strategy's split_params and split_batch would place on `mesh`.

    They are traced over the same devices as a mesh of Explicit axes: there a sharding is part of an array's type, so
    it comes out of a trace in which nothing is placed. What goes in are views of one zero.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    rows, width, dtype = run.problem.batch, run.problem.width, jnp.dtype(run.problem.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)  # as `train.make_batch` has it

    def array(*shape: int, dtype: Any = dtype) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)

    full = [Layer(array(width, width), array(width))] * run.problem.layers
    batch = Batch(array(rows, width), array(rows, width), array(rows, 1, dtype=wide))
    typed = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,))
    split = jax.eval_shape(lambda: (strategy.split_params(full, typed, run), strategy.split_batch(batch, typed, run)))
    shardings = jax.tree.map(lambda a: NamedSharding(mesh, a.sharding.spec if a.sharding else PartitionSpec()), split)
    return with_shardings(split, shardings)


def with_shardings(tree: Any, shardings: Any) -> Any:
    """Shapes with shardings beside them -> shapes that carry theirs."""
    import jax

    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings)
