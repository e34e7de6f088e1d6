"""The reference: forward pass, hand-written backward pass and updates in NumPy and float64.

Every run is compared with it, and finite differences check it in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from contract.blocks import SUBLAYERS, Back, gelu
from contract.optimizer import SLOTS, AdamW, Sgd, adamw_update, sgd_update
from contract.problem import Batch, Layer, Problem
from contract.strategy import Run, RunResult


def linear(layer: Layer, x: np.ndarray, problem: Problem | None) -> tuple[np.ndarray, Back]:
    """gelu(x @ w + b) of x[B, D]."""
    out, slope = gelu(x @ layer.w + layer.b)

    def back(dy: np.ndarray) -> tuple[np.ndarray, Layer]:
        dz = dy * slope
        return dz @ layer.w.T, Layer(x.T @ dz, dz.sum(axis=0))

    return out, back


LAYERS: dict[type, Callable[..., tuple[np.ndarray, Back]]] = {Layer: linear, **SUBLAYERS}


def forward(params: list[Any], x: np.ndarray, problem: Problem | None = None) -> tuple[np.ndarray, list[Back]]:
    """The output, shaped as x, and the backward pass of each layer."""
    backs = []
    for layer in params:
        x, back = LAYERS[type(layer)](layer, x, problem)
        backs.append(back)
    return x, backs


def loss_and_grads(params: list[Any], batch: Batch, problem: Problem | None = None) -> tuple[float, list[Any]]:
    """The mean squared error and its gradient with respect to every parameter."""
    out, backs = forward(params, batch.x, problem)
    residual = out - batch.y
    loss = float(np.sum(batch.weight * residual**2))
    dx = 2 * batch.weight * residual
    grads = []
    for back in reversed(backs):
        dx, of_layer = back(dx)
        grads.append(of_layer)
    return loss, grads[::-1]


def norm(layers: list[Any]) -> float:
    """The Euclidean norm over all parameters (or gradients) taken as one vector."""
    return math.sqrt(sum(float(np.sum(np.square(a, dtype=np.float64))) for layer in layers for a in layer))


def run(run: Run) -> RunResult:
    """Train in float64 on one device, whatever strategy, degree and dtype `run` names."""
    params = run.problem.parameters()
    state = {slot: [layer._make(map(np.zeros_like, layer)) for layer in params] for slot in SLOTS[run.optimizer]}
    losses, grad_norms, first_grads = [], [], []
    for step in range(run.steps):
        loss, grads = loss_and_grads(params, run.problem.data(step), run.problem)
        losses.append(loss)
        grad_norms.append(norm(grads))
        if step == 0:
            first_grads = grads
        params, state = _update(params, grads, state, step + 1, run.optimizer)
    return RunResult(np.array(losses), first_grads, np.array(grad_norms), params, state)


def _update(
    params: list[Any], grads: list[Any], state: dict[str, list[Any]], step: int, optimizer: str
) -> tuple[list[Any], dict[str, list[Any]]]:
    """The parameters and the state after one update; `step` counts from 1."""
    slots = SLOTS[optimizer]

    def update(p: np.ndarray, g: np.ndarray, *old: np.ndarray) -> tuple[np.ndarray, ...]:
        if optimizer == "sgd":
            return sgd_update(p, g, *old, opt=Sgd())
        return adamw_update(p, g, *old, step=step, opt=AdamW())

    new: list[list[Any]] = [[] for _ in ("params", *slots)]
    for tensors in zip(params, grads, *(state[slot] for slot in slots), strict=True):
        updated = [update(*each) for each in zip(*tensors, strict=True)]
        for layers, values in zip(new, zip(*updated, strict=True), strict=True):
            layers.append(tensors[0]._make(values))
    return new[0], dict(zip(slots, new[1:], strict=True))
