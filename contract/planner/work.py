"""The time that a device computes for one layer of a rank's share, and for the update.

A product of [b, F] and [F, G] takes 2 b F G flops. On a device with a roofline it takes at least as long as reading its
operands and writing its result once, and the elementwise operations of a layer take the time of their bytes: bias and
gelu read and write b x G elements twice each in the forward pass, and twice each in the backward pass (gelu' reads two
arrays and writes one, the bias's gradient reads one). The update reads and writes every parameter's values once:
parameter, gradient and the optimizer's state in, parameter and state out.
"""

from __future__ import annotations

from dataclasses import dataclass

from contract.optimizer import SLOTS
from contract.problem import BYTES
from contract.strategy import Run
from shardiff.devices import Device

ELEMENTWISE = 4  # accesses of an element of the output, in the forward pass as in the backward pass


@dataclass(frozen=True)
class Work:
    """flops and bytes of something, which say how long it takes."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


def product(rows: int, features: int, outputs: int, dtype: str) -> Work:
    """X[rows, features] @ W[features, outputs]. Its two transposes in the backward pass are as large."""
    elements = rows * features + features * outputs + rows * outputs
    return Work(2 * rows * features * outputs, elements * BYTES[dtype])


def seconds(device: Device, features: int, outputs: int, dtype: str, rows: int) -> tuple[float, float]:
    """(one product, the elementwise operations of one pass) of a layer with W[features, outputs]."""
    one = product(rows, features, outputs, dtype)
    if not device.roofline:
        return one.flops / device.rate(dtype), 0.0
    elementwise = ELEMENTWISE * rows * outputs * BYTES[dtype] / device.memory_bandwidth
    return max(one.flops / device.rate(dtype), one.bytes / device.memory_bandwidth), elementwise


def update_bytes(run: Run, elements: int) -> int:
    """Bytes that the optimizer reads and writes: 7 arrays for AdamW, 5 for SGD with momentum."""
    return (3 + 2 * len(SLOTS[run.optimizer])) * elements * BYTES[run.problem.dtype]
