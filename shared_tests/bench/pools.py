"""Rank processes for tests of benchmarks, which start as few as they can: starting them is not what they claim."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from shardiff.ranks import torch_pool
from shared_tests import quick


@contextmanager
def shared(pool: torch_pool.Workers) -> Iterator[None]:
    """Inside, whoever starts a pool of torch ranks gets this one, and JAX ranks compile in half the time."""

    @contextmanager
    def workers(world_size: int, *_: Any) -> Iterator[Any]:
        yield SimpleNamespace(call=partial(pool.call, world_size=world_size))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_pool, "workers", workers)
        patch.setenv("XLA_FLAGS", quick.flags())
        yield
