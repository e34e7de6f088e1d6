"""The layers of a transformer block in NumPy: forward, and a backward pass by hand.

Every forward function returns its output and a function from the gradient of the output to those of the input and of
the parameters. Shapes: B sequences of S tokens with D features, H heads of K features, E experts of capacity C.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from contract.transformer import EPSILON, Attention, Experts, Mlp, Transformer

Back = Callable[[np.ndarray], tuple[np.ndarray, Any]]  # dY -> dX, gradients of the layer


def normal_cdf(x: np.ndarray) -> np.ndarray:
    """Phi(x), the distribution function of N(0, 1). NumPy has no erf, so math.erf is applied to each value."""
    scaled = (x * math.sqrt(0.5)).ravel()
    return 0.5 * (1 + np.fromiter(map(math.erf, scaled), np.float64, scaled.size).reshape(x.shape))


def gelu(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """gelu(z) = z Phi(z) (Hendrycks and Gimpel, 1606.08415), and its derivative Phi(z) + z phi(z)."""
    cdf = normal_cdf(z)
    return z * cdf, cdf + z * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def softmax(z: np.ndarray) -> np.ndarray:
    """Over the last dim."""
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def softmax_back(p: np.ndarray, dp: np.ndarray) -> np.ndarray:
    """The gradient of softmax's input from its output p and the gradient of p."""
    return p * (dp - (dp * p).sum(axis=-1, keepdims=True))


def norm(x: np.ndarray, gain: np.ndarray) -> tuple[np.ndarray, Back]:
    """RMSNorm (Zhang and Sennrich, 1910.07467): x / sqrt(mean(x^2) + epsilon) * gain, over the features."""
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON)
    unit = x * scale

    def back(dh: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        dunit = dh * gain
        dx = scale * (dunit - unit * np.mean(dunit * unit, axis=-1, keepdims=True))
        return dx, (dh * unit).reshape(-1, len(gain)).sum(axis=0)

    return unit * gain, back


def product(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """dW[D, F] of Y[B, S, F] = X[B, S, D] @ W[D, F]."""
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


def attention(layer: Attention, x: np.ndarray, problem: Transformer) -> tuple[np.ndarray, Back]:
    """x + softmax(Q K^T / sqrt(K), causal) V O, of a normalized x[B, S, D] (Vaswani et al., 1706.03762)."""
    heads = problem.heads
    h, norm_back = norm(x, layer.gain)

    def split(a: np.ndarray) -> np.ndarray:  # [B, S, H K] -> [B, H, S, K]
        return a.reshape(*a.shape[:2], heads, -1).swapaxes(1, 2)

    def merged(a: np.ndarray) -> np.ndarray:
        return a.swapaxes(1, 2).reshape(*x.shape[:2], -1)

    q, k, v = (split(h @ w) for w in (layer.q, layer.k, layer.v))
    size, scale = x.shape[1], 1 / math.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones((size, size), bool)), q @ k.swapaxes(2, 3) * scale, -np.inf)
    p = softmax(scores)
    out = merged(p @ v)

    def back(dy: np.ndarray) -> tuple[np.ndarray, Attention]:
        dout = split(dy @ layer.o.T)
        ds = softmax_back(p, dout @ v.swapaxes(2, 3)) * scale
        dq, dk, dv = (merged(a) for a in (ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout))
        dx, dgain = norm_back(dq @ layer.q.T + dk @ layer.k.T + dv @ layer.v.T)
        return dy + dx, Attention(dgain, product(h, dq), product(h, dk), product(h, dv), product(out, dy))

    return x + out @ layer.o, back


def mlp(layer: Mlp, x: np.ndarray, problem: Transformer) -> tuple[np.ndarray, Back]:
    """x + gelu(h @ up) @ down, of a normalized x[B, S, D]."""
    h, norm_back = norm(x, layer.gain)
    a, slope = gelu(h @ layer.up)

    def back(dy: np.ndarray) -> tuple[np.ndarray, Mlp]:
        dz = dy @ layer.down.T * slope
        dx, dgain = norm_back(dz @ layer.up.T)
        return dy + dx, Mlp(dgain, product(h, dz), product(a, dy))

    return x + a @ layer.down, back


def route(probabilities: np.ndarray, problem: Transformer) -> tuple[np.ndarray, np.ndarray]:
    """Which experts the tokens choose, [B, S, k, E], and the slots that they get, [B, S, k, E, C]; both are 0 or 1.

    First choices are served before second ones, and tokens in their order. Who finds an expert full gets no slot.
    """
    best = np.argsort(-probabilities, axis=-1, kind="stable")[..., : problem.top_k]
    chosen = (best[..., None] == np.arange(problem.experts)).astype(np.float64)
    queue = chosen.swapaxes(1, 2).reshape(len(chosen), -1, problem.experts)  # [B, k S, E]
    ahead = (queue.cumsum(axis=1) - queue).reshape(chosen.swapaxes(1, 2).shape).swapaxes(1, 2)
    return chosen, chosen[..., None] * (ahead[..., None] == np.arange(problem.capacity))


def experts(layer: Experts, x: np.ndarray, problem: Transformer) -> tuple[np.ndarray, Back]:
    """x + the gated sum of the outputs of top-k experts, of a normalized x[B, S, D] (Shazeer et al., 1701.06538)."""
    h, norm_back = norm(x, layer.gain)
    probabilities = softmax(h @ layer.router)
    chosen, slots = route(probabilities, problem)
    top = np.einsum("bske,bse->bsk", chosen, probabilities)
    total = top.sum(axis=-1, keepdims=True)
    gates = top / total  # a dropped choice keeps its share of the sum, and adds nothing
    dispatched = np.einsum("bskec,bsd->becd", slots, h)
    a, slope = gelu(np.einsum("becd,edf->becf", dispatched, layer.up))
    out = np.einsum("becf,efd->becd", a, layer.down)
    y = np.einsum("bsk,bskec,becd->bsd", gates, slots, out, optimize=True)

    def back(dy: np.ndarray) -> tuple[np.ndarray, Experts]:
        dgates = np.einsum("bskec,bsd,becd->bsk", slots, dy, out, optimize=True)
        dout = np.einsum("bsk,bskec,bsd->becd", gates, slots, dy, optimize=True)
        dz = np.einsum("becd,efd->becf", dout, layer.down) * slope
        dtop = (dgates - (dgates * gates).sum(axis=-1, keepdims=True)) / total
        dlogits = softmax_back(probabilities, np.einsum("bsk,bske->bse", dtop, chosen))
        dh = np.einsum("bskec,becd->bsd", slots, np.einsum("becf,edf->becd", dz, layer.up)) + dlogits @ layer.router.T
        dx, dgain = norm_back(dh)
        dup, ddown = np.einsum("becd,becf->edf", dispatched, dz), np.einsum("becf,becd->efd", a, dout)
        return dy + dx, Experts(dgain, product(h, dlogits), dup, ddown)

    return x + y, back


SUBLAYERS: dict[type, Callable[..., tuple[np.ndarray, Back]]] = {Attention: attention, Mlp: mlp, Experts: experts}
