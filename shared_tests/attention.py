"""What tests of attention over a split sequence run, in torch on the ranks of a pool and in JAX, and its definition."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

BEFORE_FORK = ("torch_impl.blocks", "torch_impl.explicit.ring_attention", "contract.strategy")
NAMES = ("output", "gradient of q", "gradient of k", "gradient of v")
Arrays = list[np.ndarray]


def inputs(samples: int, tokens: int, heads: int, size: int, largest: float) -> Arrays:
    """q, k, v[B, S, H, K] and the gradient of the output, which bfloat16 holds exactly.

    Of the last sample the queries are so large that its scores reach `largest`.
    """
    drawn = np.random.default_rng(0).standard_normal((4, samples, tokens, heads, size))
    scores = np.einsum("shk,thk->hst", drawn[0, -1], drawn[1, -1]) * size**-0.5
    drawn[0, -1] *= largest / np.abs(scores).max()
    return [torch.tensor(a).bfloat16().double().numpy() for a in drawn]


def exact(arrays: Arrays) -> Arrays:
    """What torch's own attention gives in float64, and its gradients."""
    return differentiated(
        lambda *qkv: F.scaled_dot_product_attention(*(a.transpose(1, 2) for a in qkv), is_causal=True).transpose(1, 2),
        [torch.tensor(a) for a in arrays],
    )


def on_one_device(arrays: Arrays, dtype: str) -> Arrays:
    """What the model computes where nothing is split."""
    from torch_impl.blocks import causal

    return differentiated(causal, [torch.tensor(a).to(getattr(torch, dtype)) for a in arrays])


def differentiated(attend: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Arrays:
    """The output and the gradients, as float64."""
    *qkv, dout = tensors
    leaves = [a.contiguous().requires_grad_() for a in qkv]
    out = attend(*leaves)
    out.backward(dout)
    return [a.detach().double().numpy() for a in (out, *(leaf.grad for leaf in leaves))]


def on_ranks(
    device: torch.device, arrays: Arrays, tried: Sequence[tuple[str, bool, str]]
) -> list[tuple[Arrays, np.ndarray]]:
    """For each (strategy, fused, dtype), this rank's part of output and gradients, and its positions.

    fused: whether the strategy may use torch's fused kernel, where the strategy knows one.
    """
    from contract.problem import Batch
    from torch_impl import fused_attention
    from torch_impl.blocks import causal
    from torch_impl.mesh import Mesh

    mesh, results = Mesh({"cp": dist.group.WORLD}), []  # type: ignore[dict-item]
    for strategy, fused, dtype in tried:
        module: Any = importlib.import_module(f"torch_impl.explicit.{strategy}")
        tensors = [torch.tensor(a).to(getattr(torch, dtype)) for a in arrays]
        positions = torch.arange(tensors[0].shape[1])[None]
        mine = [
            *module.split_batch(Batch(*tensors[:3]), mesh),
            *module.split_batch(Batch(tensors[3], positions, positions), mesh),
        ]
        with nullcontext() if fused else patch.object(fused_attention, "usable", lambda q: False):
            got = differentiated(lambda q, k, v, module=module: module.attend(q, k, v, causal, mesh), mine[:4])
        results.append((got, mine[4][0].numpy()))
    return results


def in_shard_map(strategy: str, arrays: Arrays, dtype: str, ranks: int) -> Arrays:
    """The same in JAX, put together again. The arrays are as `arranged` orders them, and so are the results."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType
    from jax.sharding import PartitionSpec as P

    from jax_impl.blocks import causal
    from shardiff.ranks.jax_devices import devices

    module: Any = importlib.import_module(f"jax_impl.shard_map.{strategy}")
    mesh = jax.make_mesh((ranks,), ("cp",), axis_types=(AxisType.Auto,), devices=devices(ranks, "cpu"))
    sequence = P(None, "cp")

    def attend(q: Any, k: Any, v: Any) -> Any:
        return module.attend(q, k, v, causal)

    split = jax.shard_map(attend, mesh=mesh, in_specs=(sequence,) * 3, out_specs=sequence)

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, back = jax.vjp(split, q, k, v)
        return out, *back(dout)

    with jax.enable_x64(dtype == "float64"):
        given = [jnp.asarray(a, dtype) for a in arrays]
        return [np.asarray(a, np.float64) for a in jax.jit(both)(*given)]


def errors(got: Arrays, want: Arrays) -> np.ndarray:
    """||got - want|| / ||want|| of each array, for each sample: [4, B]."""

    def norms(arrays: Arrays) -> np.ndarray:
        return np.array([[np.linalg.norm(sample) for sample in a] for a in arrays])

    return norms([a - b for a, b in zip(got, want, strict=True)]) / norms(want)
