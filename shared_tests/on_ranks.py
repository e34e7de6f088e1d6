"""What tests run on the ranks of a pool: small, because every rank imports it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from contract.strategy import AXES, Run
from shared_tests.edited import Edit, put_in_place


def train_edited(device: torch.device, run: Run, module: str, edits: Sequence[Edit]) -> Any:
    """`torch_impl.train.train` with one module edited, for good: a rank lives for one call."""
    put_in_place(module, edits)
    return importlib.import_module("torch_impl.train").train(device, run)


def train_with_buckets(device: torch.device, run: Run, limit: int) -> Any:
    """`torch_impl.train.train` with data_parallel's buckets of `limit` bytes."""
    from torch_impl import data_parallel, train

    data_parallel.make_buckets = functools.partial(data_parallel.make_buckets, limit=limit)
    return train.train(device, run)


def loss_alone(device: torch.device, run: Run) -> float:
    """What the strategy's `loss` gives on the initial parameters and the first batch."""
    from torch_impl import train

    strategy = importlib.import_module(f"torch_impl.{run.strategy}")
    mesh = init_device_mesh(device.type, (run.degree,), mesh_dim_names=(AXES[run.strategy] or "one",))
    params = train.make_params(strategy, mesh, run, device)
    return strategy.loss(params, train.make_batch(strategy, mesh, run, 0, device), mesh, run).item()
