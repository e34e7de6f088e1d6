"""Training steps of torch on one device, with and without torch.compile, beside the device's own rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import cuda
from benchmarks.gpu.rates import device_rates, step_row
from benchmarks.gpu.sizes import Sizes
from contract.axes import one_axis
from contract.problem import Batch, Problem
from contract.strategy import Run
from contract.transformer import Transformer
from torch_impl import train
from torch_impl.blocks import Blocks
from torch_impl.compose import loss_and_grads
from torch_impl.mesh import Mesh
from torch_impl.model import clear_grads, forward, squared_error, take_grads

DTYPES = ("bfloat16", "float32")
WARM_UP = 3
Passes = Callable[[list[Any], Batch], list[Any]]  # forward and backward pass: the gradients


def measure(sizes: Sizes, keep: Any) -> None:
    """The rates of the device, then the steps as this project runs them, then those that torch.compile makes."""
    torch.set_float32_matmul_precision("highest")  # float32 means float32: no TF32
    rates, steps = [], []
    for dtype in DTYPES:
        rates.append(measure_rates(sizes, replace(sizes.step, dtype=dtype)))
        keep({"rates": rates, "steps": steps})
    for model in (sizes.step, sizes.step_block):
        for name in ("eager", "compiled"):  # to compile takes longest
            for of_device in rates:
                if name == "compiled" and of_device["dtype"] not in sizes.compiled:
                    continue
                problem = replace(model, dtype=of_device["dtype"])
                steps.append(measure_step(sizes, name, problem, of_device))
                keep({"rates": rates, "steps": steps})


def measure_rates(sizes: Sizes, problem: Problem) -> dict[str, Any]:
    """X[B, D] @ W[D, D] on random data, and a copy of as many bytes as the parameters have."""
    device, dtype = cuda.torch_device(sizes.device), getattr(torch, problem.dtype)
    x = torch.randn(problem.batch, problem.width, device=device, dtype=dtype)
    w = torch.randn(problem.width, problem.width, device=device, dtype=dtype)
    out = torch.empty_like(x)
    source = torch.empty(problem.layers * problem.width**2, device=device, dtype=dtype)
    target = torch.empty_like(source)
    product = cuda.timed(sizes.device, lambda: torch.mm(x, w, out=out), sizes.iterations, WARM_UP)
    copy = cuda.timed(sizes.device, lambda: target.copy_(source), sizes.iterations, WARM_UP)
    return device_rates("torch", problem, product, copy, 2 * source.nbytes)


def measure_step(sizes: Sizes, name: str, problem: Problem, rates: dict[str, Any]) -> dict[str, Any]:
    """The whole step, its passes and its update. name: "eager" or "compiled"."""
    cuda.forget_peak(sizes.device)
    device = cuda.torch_device(sizes.device)
    run = Run("torch", one_axis("single_device", 1), problem, device=sizes.device)
    params, batch = draw(problem, device)
    optimizer = train.make_optimizer(params, run)
    passes = eager(run) if name == "eager" else compiled(problem)
    grads: list[Any] = []

    def forward_and_backward() -> None:
        grads[:] = passes(params, batch)

    def update() -> None:
        train.update(optimizer, params, grads)

    def step() -> None:
        forward_and_backward()
        update()

    seconds = {
        kind: cuda.timed(sizes.device, act, sizes.iterations, WARM_UP)
        for kind, act in (("step", step), ("passes", forward_and_backward), ("update", update))
    }
    return step_row(rates, name, problem, seconds, cuda.peak_bytes(sizes.device))


def eager(run: Run) -> Passes:
    """As single_device runs them."""
    return lambda params, batch: loss_and_grads(params, batch, Mesh({}), run)[1]


def compiled(problem: Problem) -> Passes:
    """The same model through torch.compile, which also compiles the backward pass."""
    kinds = [type(layer) for layer in problem.shapes()]
    model = Blocks(problem, ()) if isinstance(problem, Transformer) else forward

    def loss_of(params: list[tuple[Tensor, ...]], x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        layers = [kind(*tensors) for kind, tensors in zip(kinds, params, strict=True)]
        return squared_error(model(layers, x, Mesh({})), Batch(x, y, weight))

    fast = torch.compile(loss_of)

    def passes(params: list[Any], batch: Batch) -> list[Any]:
        clear_grads(params)
        fast([tuple(layer) for layer in params], *batch).backward()
        return list(take_grads(params))

    return passes


def draw(problem: Problem, device: torch.device) -> tuple[list[Any], Batch]:
    """Parameters and a batch, drawn on the device: to draw them in NumPy, as proofs do, takes longer than the part."""
    dtype = getattr(torch, problem.dtype)
    normal = partial(torch.randn, device=device, dtype=dtype)
    around = 1.0 if isinstance(problem, Transformer) else 0.0  # gains, or biases

    def drawn(shape: tuple[int, ...]) -> Tensor:
        values = normal(*shape)
        made = values.mul_(0.1).add_(around) if len(shape) == 1 else values.div_(shape[-2] ** 0.5)
        return made.requires_grad_()

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    samples = (problem.batch, problem.sequence) if isinstance(problem, Transformer) else (problem.batch,)
    share = 1 / (problem.batch * problem.sequence * problem.width)
    weight = torch.full((*samples, 1), share, device=device, dtype=wide)
    x, y = (normal(*samples, problem.width) for _ in range(2))
    return [layer._make(map(drawn, layer)) for layer in problem.shapes()], Batch(x, y, weight)
