"""SGD with momentum and AdamW: their hyperparameters, and their updates in NumPy.

The conventions are those that torch.optim and optax share: Sutskever's momentum without dampening (v = mu v + g),
decoupled weight decay (Loshchilov and Hutter, 1711.05101), and epsilon outside the root (Kingma and Ba, 1412.6980).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

OPTIMIZERS = ("sgd", "adamw")


@dataclass(frozen=True)
class Sgd:
    lr: float = 0.1
    momentum: float = 0.9


@dataclass(frozen=True)
class AdamW:
    lr: float = 1e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01


SLOTS = {"sgd": ("momentum",), "adamw": ("m", "v")}  # the optimizer's state; each has the parameters' shapes


def sgd_update(p: np.ndarray, g: np.ndarray, momentum: np.ndarray, opt: Sgd) -> tuple[np.ndarray, np.ndarray]:
    """The new parameter and the new momentum buffer."""
    momentum = opt.momentum * momentum + g
    return p - opt.lr * momentum, momentum


def adamw_update(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, step: int, opt: AdamW
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The new parameter, first moment and second moment after step number `step`, counted from 1."""
    m = opt.b1 * m + (1 - opt.b1) * g
    v = opt.b2 * v + (1 - opt.b2) * g * g
    m_hat = m / (1 - opt.b1**step)
    v_hat = v / (1 - opt.b2**step)
    p = p - opt.lr * opt.weight_decay * p
    return p - opt.lr * m_hat / (np.sqrt(v_hat) + opt.eps), m, v
