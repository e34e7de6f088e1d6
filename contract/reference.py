"""The reference: forward pass, hand-written backward pass and updates in NumPy and float64.

Every run is compared with it, and finite differences check it in turn.
"""

from __future__ import annotations

import math

import numpy as np

from contract.optimizer import SLOTS, AdamW, Sgd, adamw_update, sgd_update
from contract.problem import Batch, Layer
from contract.strategy import Run, RunResult


def normal_cdf(x: np.ndarray) -> np.ndarray:
    """Phi(x), the distribution function of N(0, 1). NumPy has no erf, so math.erf is applied to each value."""
    scaled = (x * math.sqrt(0.5)).ravel()
    return 0.5 * (1 + np.fromiter(map(math.erf, scaled), np.float64, scaled.size).reshape(x.shape))


def forward(params: list[Layer], x: np.ndarray) -> tuple[np.ndarray, list[tuple[np.ndarray, ...]]]:
    """The output [B, D], and what the backward pass needs of each layer: input, pre-activation, Phi(pre-activation)."""
    saved = []
    for w, b in params:
        z = x @ w + b
        cdf = normal_cdf(z)
        saved.append((x, z, cdf))
        x = z * cdf  # gelu(z) = z Phi(z), Hendrycks and Gimpel, 1606.08415
    return x, saved


def loss_and_grads(params: list[Layer], batch: Batch) -> tuple[float, list[Layer]]:
    """The mean squared error and its gradient with respect to every parameter."""
    out, saved = forward(params, batch.x)
    residual = out - batch.y
    loss = float(np.sum(batch.weight * residual**2))
    dx = 2 * batch.weight * residual
    grads = []
    for (w, _), (x, z, cdf) in zip(reversed(params), reversed(saved), strict=True):
        pdf = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        dz = dx * (cdf + z * pdf)
        grads.append(Layer(x.T @ dz, dz.sum(axis=0)))
        dx = dz @ w.T
    return loss, grads[::-1]


def norm(layers: list[Layer]) -> float:
    """The Euclidean norm over all parameters (or gradients) taken as one vector."""
    return math.sqrt(sum(float(np.sum(np.square(a, dtype=np.float64))) for layer in layers for a in layer))


def run(run: Run) -> RunResult:
    """Train in float64 on one device, whatever strategy, degree and dtype `run` names."""
    params = run.problem.parameters()
    state = {slot: [Layer(*map(np.zeros_like, layer)) for layer in params] for slot in SLOTS[run.optimizer]}
    losses, grad_norms, first_grads = [], [], []
    for step in range(run.steps):
        loss, grads = loss_and_grads(params, run.problem.data(step))
        losses.append(loss)
        grad_norms.append(norm(grads))
        if step == 0:
            first_grads = grads
        params, state = _update(params, grads, state, step + 1, run.optimizer)
    return RunResult(np.array(losses), first_grads, np.array(grad_norms), params, state)


def _update(
    params: list[Layer], grads: list[Layer], state: dict[str, list[Layer]], step: int, optimizer: str
) -> tuple[list[Layer], dict[str, list[Layer]]]:
    """The parameters and the state after one update; `step` counts from 1."""
    slots = SLOTS[optimizer]

    def update(p: np.ndarray, g: np.ndarray, *old: np.ndarray) -> tuple[np.ndarray, ...]:
        if optimizer == "sgd":
            return sgd_update(p, g, *old, opt=Sgd())
        return adamw_update(p, g, *old, step=step, opt=AdamW())

    new: list[list[Layer]] = [[] for _ in ("params", *slots)]
    for tensors in zip(params, grads, *(state[slot] for slot in slots), strict=True):
        w, b = (update(*(layer[kind] for layer in tensors)) for kind in range(2))
        for layers, layer in zip(new, map(Layer, w, b), strict=True):
            layers.append(layer)
    return new[0], dict(zip(slots, new[1:], strict=True))
