"""Devices that a plan can be made for, with their links, as their makers state them, or as a file states them.

Peak rates are those of dense products in the precision that this project pins: no TF32, and on TPUs six bfloat16
passes for a float32 product (jax's `highest`). Memory and its bandwidth are those of `shardiff.compiling.hardware`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shardiff.compiling.hardware import FAMILIES
from shardiff.cost import Link, Measured, Network
from shardiff.mesh import MOST_RANKS
from shardiff.system.inputs import NotJson, read_json

# Of the peak, what products reach: 770 to 800 of 989 TFLOP/s in bfloat16, 8192^3, random data, as this project measured
# on an H200. It is taken for all devices of the table, since no other one was measured.
ATTAINED = 0.79
NCCL = "NCCL src/graph/tuning.cc, ring, Simple protocol: 8.4 us a call, 3.4 us an NVLink step, 9.6 us a network step"
BOOK = "How to Scale Your Model, tpus.md: one-way ICI bandwidth of a link, 1 us a hop, 25 GB/s of DCN a host"


@dataclass(frozen=True)
class Device:
    """rates: dtype -> flops/s that matrix products reach. memory: bytes; memory_bandwidth: bytes/s.

    roofline: whether products and elementwise operations are bounded by the memory's bandwidth too; a paced device
    counts flops, and memory in the update alone. overhead: seconds of a step that nothing hides.
    """

    name: str
    rates: Mapping[str, float]
    memory: float
    memory_bandwidth: float
    roofline: bool = True
    overhead: float = 0.0
    sources: tuple[str, ...] = ()

    def rate(self, dtype: str) -> float:
        """flops/s of products in this dtype. Raises ValueError if the device has no rate for it."""
        if dtype not in self.rates:
            raise ValueError(f"{self.name} has no rate for {dtype}; it has {', '.join(self.rates)}")
        return self.rates[dtype]


@dataclass(frozen=True)
class Machine:
    """Devices on a network. links_source: where the figures of the links are from."""

    device: Device
    network: Network
    links_source: str = ""

    def __str__(self) -> str:
        return f"{self.device.name}:{self.network.hosts}x{self.network.devices}"


@dataclass(frozen=True)
class Datasheet:
    """peak: dtype -> flops/s. link: bytes/s of a device's links in each direction, as a ring uses them; interface:
    bytes/s of one interface to other hosts; shared_by: the devices that have one interface together."""

    peak: Mapping[str, float]
    link: float
    interface: float
    source: str
    shared_by: int = 1


def _tpu(bfloat16: float, ici: float, chips: int, source: str) -> Datasheet:
    peak = {"float32": bfloat16 / 6, "bfloat16": bfloat16}
    return Datasheet(peak, 2 * ici, 25e9, f"{source}; {BOOK}; a ring uses the two links of one axis", chips)


def _gpu(float64: float, float32: float, bfloat16: float, link: float, interface: float, source: str) -> Datasheet:
    peak = {"float64": float64, "float32": float32, "bfloat16": bfloat16}
    return Datasheet(peak, link, interface, f"{source}; {NCCL}")


HOPPER = "datasheet of {}: FP64 and FP32 67, BF16 989 TFLOP/s dense, NVLink 900 GB/s both ways; {}: 8 x 400 Gbit/s"
DATASHEETS = {
    "a100": _gpu(
        19.5e12,
        19.5e12,
        312e12,
        300e9,
        25e9,
        "datasheet of the A100 SXM 80 GB: FP64 (tensor cores) and FP32 19.5, BF16 312 TFLOP/s dense, NVLink 600 GB/s "
        "both ways; of the DGX A100: 8 x 200 Gbit/s",
    ),
    "h100": _gpu(67e12, 67e12, 989e12, 450e9, 50e9, HOPPER.format("the H100 SXM", "of the DGX H100")),
    "h200": _gpu(67e12, 67e12, 989e12, 450e9, 50e9, HOPPER.format("the H200 SXM", "of the DGX H200")),
    "b200": _gpu(
        40e12,
        80e12,
        2250e12,
        900e9,
        50e9,
        "Blackwell architecture brief, HGX B200: FP64 40, FP32 80, BF16 2,250 TFLOP/s dense, NVLink 1.8 TB/s both "
        "ways; datasheet of the DGX B200: 8 x 400 Gbit/s",
    ),
    "v5e": _tpu(197e12, 45e9, 8, "Google Cloud TPU documentation, v5e: BF16 197 TFLOP/s"),
    "v5p": _tpu(459e12, 90e9, 4, "Google Cloud TPU documentation, v5p: BF16 459 TFLOP/s"),
    "v6e": _tpu(918e12, 90e9, 8, "Google Cloud TPU documentation, v6e: BF16 918 TFLOP/s"),
    "tpu7x": _tpu(
        2307e12, 100e9, 4, "Google Cloud TPU documentation, TPU7x: BF16 2,307 TFLOP/s, ICI 1.2 TB/s both ways, 6 links"
    ),
}
GPUS = ("a100", "h100", "h200", "b200")


def parse(text: str) -> Machine:
    """`h100:4x8`, hosts x devices, or `h100:8`. On TPUs a host stands for a slice. ValueError, one line, otherwise."""
    name, _, size = text.partition(":")
    if name not in DATASHEETS:
        raise ValueError(f"unknown devices {name!r}; known: {', '.join(DATASHEETS)}, or a .json file of a machine")
    found = re.fullmatch(r"(?:([0-9]{1,6})x)?([0-9]{1,6})", size)
    if not found or not (hosts := int(found[1] or 1)) or not (devices := int(found[2])):
        raise ValueError(f"{text!r} needs a size, hosts x devices of each, such as {name}:8 or {name}:4x8")
    if hosts * devices > MOST_RANKS:
        raise ValueError(f"a plan is for at most {MOST_RANKS:,} devices, {text} has {hosts * devices:,}")
    sheet, family = DATASHEETS[name], FAMILIES[name]
    interfaces = -(-devices // sheet.shared_by)
    call, step, over = (8.4e-6, 3.4e-6, 9.6e-6) if name in GPUS else (0.0, 1e-6, 10e-6)
    network = Network(
        Link(sheet.link, step), Link(sheet.interface * interfaces, over), hosts, devices, interfaces, call
    )
    reached = f"products reach {ATTAINED:.0%} of the peak, as this project measured on an H200"
    rates = {dtype: ATTAINED * peak for dtype, peak in sheet.peak.items()}
    sources = (sheet.source, f"memory: {family.source}", reached)
    return Machine(Device(name, rates, family.memory, family.memory_bandwidth, sources=sources), network, sheet.source)


Positive = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Several = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]


class _Link(msgspec.Struct, forbid_unknown_fields=True):
    bandwidth: Positive
    latency: NotNegative = 0.0
    burst: NotNegative = 0.0


class _Collective(msgspec.Struct, forbid_unknown_fields=True):
    op: str
    ranks: Several
    latency: NotNegative
    overhead: Positive = 1.0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    name: str
    rates: dict[str, Positive]
    memory: Positive
    memory_bandwidth: Positive
    inside: _Link
    schema: int = 1
    hosts: Several = 1
    devices: Several = 1
    between: _Link | None = None
    interfaces: Several = 1
    call: NotNegative = 0.0
    roofline: bool = True
    overhead: NotNegative = 0.0
    source: str = ""
    collectives: list[_Collective] = []


def read(path: Path) -> Machine:
    """A machine from a JSON file: bytes, seconds, flops/s. Raises ValueError, one line, for what is no such file."""
    try:
        content = read_json(path)
    except NotJson as error:
        raise ValueError(str(error)) from None
    if not isinstance(content, dict) or content.get("kind") != "machine":
        raise ValueError(f'{path}: not a machine; such a file has "kind": "machine"')
    return machine_of(content, str(path))


def machine_of(content: Mapping[str, Any], where: str) -> Machine:
    """The same from plain JSON types."""
    try:
        file = msgspec.convert(content, _File)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None
    if file.schema != 1:
        raise ValueError(f"{where}: a machine of schema {file.schema}; this shardiff reads schema 1")
    inside = Link(file.inside.bandwidth, file.inside.latency, file.inside.burst)
    other = file.between or file.inside
    between = Link(other.bandwidth, other.latency, other.burst)
    measured = {(one.op, one.ranks): Measured(one.latency, one.overhead) for one in file.collectives}
    network = Network(inside, between, file.hosts, file.devices, file.interfaces, file.call, measured)
    device = Device(
        file.name, file.rates, file.memory, file.memory_bandwidth, file.roofline, file.overhead, (file.source or where,)
    )
    return Machine(device, network, file.source or where)


def sized(machine: Machine, hosts: int, devices: int) -> Machine:
    """The same devices in another number."""
    return replace(machine, network=replace(machine.network, hosts=hosts, devices=devices))
