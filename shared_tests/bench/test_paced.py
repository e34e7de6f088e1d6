"""A paced device: values are real, its time is 2 m k n / rate, and a CPU that falls behind is noticed."""

from __future__ import annotations

import pytest
import torch

from torch_impl.paced import PacedDevice


class Time:
    """A clock that moves when something sleeps, and by `cost` with every reading."""

    def __init__(self, cost: float = 0.0) -> None:
        self.now, self.cost = 100.0, cost

    def __call__(self) -> float:
        self.now += self.cost
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def paced(rate: float, cost: float = 0.0, memory: float = float("inf")) -> tuple[PacedDevice, Time]:
    clock = Time(cost)
    return PacedDevice(rate, memory, clock, clock.sleep), clock


def test_products_take_their_operations_over_the_rate_and_the_host_goes_on():
    device, clock = paced(1e3)
    x, w, b = torch.randn(2, 3), torch.randn(3, 5), torch.randn(5)
    with device:
        y = torch.addmm(b, x, w) + x @ w
        assert clock.now == 100
        device.synchronize()
    assert clock.now == pytest.approx(100 + 2 * 2 * 2 * 3 * 5 / 1e3)
    assert torch.allclose(y, b + 2 * (x @ w)) and device.late == 0


def test_the_backward_pass_takes_its_two_products():
    device, clock = paced(1e3)
    x, w = torch.randn(2, 3, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    with device:
        (x @ w).sum().backward()
        device.synchronize()
    assert clock.now == pytest.approx(100 + 3 * 2 * 2 * 3 * 5 / 1e3)


def test_an_idle_device_makes_nobody_wait():
    device, clock = paced(1e3)
    with device:
        torch.ones(2).add(1)
        device.synchronize()
    assert clock.now == 100 and device.late == 0


def test_a_cpu_that_falls_behind_is_noticed():
    device, _ = paced(60e3, cost=1.0)  # a product takes 1 ms there, and every reading of the clock a second here
    with device:
        torch.randn(2, 3) @ torch.randn(3, 5)
        device.synchronize()
    assert device.late > 1


def test_an_update_takes_seven_passes_over_the_memory():
    device, clock = paced(1e3, memory=1e3)
    p = torch.zeros(10, requires_grad=True)
    p.grad = torch.ones(10)
    optimizer = torch.optim.AdamW([p], fused=True)
    with device:
        optimizer.step()
        device.synchronize()
    assert clock.now == pytest.approx(100 + 7 * 40 / 1e3)
