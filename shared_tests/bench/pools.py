"""Rank processes that tests of benchmarks share, because none of them is about starting ranks."""

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
    """Within the context, code that starts a pool of torch ranks gets this pool, and JAX ranks compile quickly."""

    @contextmanager
    def workers(world_size: int, *_: Any) -> Iterator[Any]:
        yield SimpleNamespace(call=partial(pool.call, world_size=world_size))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_pool, "workers", workers)
        patch.setenv("XLA_FLAGS", quick.flags())
        yield
