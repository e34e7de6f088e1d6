"""Hardware that programs can be compiled for, by name and size."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from shardiff.system.extras import installed
from shardiff.system.machine import cores

PRECISIONS = ("default", "highest")


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
    here = {"cpu": lambda name: cores(), "gpu": attached.get, "tpu": lambda name: None}
    return [Known(n, f, has_compiler(f.kind), here[f.kind](n)) for n, f in FAMILIES.items()]


def missing_compiler(kind: str) -> str:
    """The command that installs the compiler for a kind of target."""
    return f'pip install "shardiff[{"jax" if kind == "cpu" else "compilers"}]"'


def has_compiler(kind: str) -> bool:
    """Whether the compiler for a kind of target is installed. The CPU's comes with jax."""
    if kind == "gpu":
        return any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins"))
    return installed("libtpu" if kind == "tpu" else "jax")
