"""A device of a stated rate beside the CPU, for measuring what more ranks than cores would do.

The CPU computes the real values, and the time of the products passes on a clock, as kernels pass on a stream: the host
goes on while the device works, and waits for it before a collective or a send and at the end of a step. As long as the
CPU is faster than the stated device, ranks that share a core do not disturb each other, because what they wait for is
the clock. Where the CPU fell behind, `late` says by how much, and the sample should be repeated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0}  # -> position of the left factor
LATE = 0.02  # a sample in which the CPU was late by more than this share of its time is no sample


class PacedDevice(TorchDispatchMode):
    """Inside `with PacedDevice(rate) as device`, a product X[m, k] @ Y[k, n] takes 2 m k n / rate seconds.

    flops_per_second: of products; all other operations take no time of their own. bytes_per_second: of the memory, for
    a fused Adam(W), which reads four arrays and writes three. late: seconds by which the CPU fell behind so far. Call
    `synchronize` before the host waits for something else, such as a receive; else that wait counts as late too. clock,
    sleep: for tests.
    """

    def __init__(
        self,
        flops_per_second: float,
        bytes_per_second: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        self.flops_per_second, self.bytes_per_second = flops_per_second, bytes_per_second
        self.clock, self.sleep = clock, sleep
        self.busy_until: float | None = None  # on the clock; None if the device has nothing to do
        self.worked: list[tuple[float, float]] = []  # from when to when, for each product or update
        self.late = 0.0

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given, like torch.cuda.synchronize."""
        if self.busy_until is not None:
            left = self.busy_until - self.clock()
            if left > 0:
                self.sleep(left)
            else:
                self.late -= left
        self.busy_until = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::") and not name.startswith("c10d::recv"):  # a receive needs nothing from the device
            self.synchronize()
        began = self.clock()
        out = func(*args, **(kwargs or {}))
        if seconds := self.seconds(func, name, args):
            start = max(began, self.busy_until or began)
            done = start + seconds
            self.worked.append((start, done))
            self.late += max(0.0, self.clock() - done)
            self.busy_until = max(done, self.clock())
        return out

    def span(self) -> tuple[float, float]:
        """From when to when the device works on what it was given since this was last asked, on the clock."""
        first, last = self.worked[0][0], self.worked[-1][1]
        self.worked.clear()
        return first, last

    def seconds(self, func: Any, name: str, args: Any) -> float:
        """How long the device takes for an operation."""
        if (first := PRODUCTS.get(func)) is not None:
            left, right = args[first], args[first + 1]
            return 2 * left.numel() * right.shape[-1] / self.flops_per_second
        if name.startswith("aten::_fused_adam"):
            return 7 * sum(p.numel() * p.element_size() for p in args[0]) / self.bytes_per_second
        return 0.0
