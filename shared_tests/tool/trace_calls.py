"""Makes calls of ranks from a few arguments, for tests of the merge."""

from __future__ import annotations

from typing import Any

import pytest

from shardiff.tracing.calls import Call
from shardiff.tracing.merge import MismatchError, merge

PAIR = (0, 1)


def call(rank: int, op: str, **fields: Any) -> Call:
    """A call of 4 float32 in a group of all ranks that the test has."""
    defaults: dict[str, Any] = {"dtype": "float32", "payload_bytes": 16, "shapes": ((4,),), "group": "0", "ranks": PAIR}
    if op in ("barrier", "wait"):
        defaults = {"group": "0", "ranks": PAIR} if op == "barrier" else {}
    return Call(rank, op, **{**defaults, "source": f"{'ab'[rank % 2]}.py:{rank}", **fields})


def send(rank: int, peer: int, **fields: Any) -> Call:
    return call(rank, "send", **{"ranks": (0, 1, 2, 3), "peer": peer, "is_async": True} | fields)


def receive(rank: int, peer: int | None, at: int, **fields: Any) -> list[Call]:
    """A receive, which is this rank's call number `at`, and its wait."""
    posted = call(rank, "recv", **{"ranks": (0, 1, 2, 3), "peer": peer, "is_async": True} | fields)
    return [posted, call(rank, "wait", of=at)]


def disagreements(*ranks: list[Call]) -> list[str]:
    with pytest.raises(MismatchError) as caught:
        merge(ranks)
    return caught.value.disagreements


def mark(rank: int, text: str, of: int | None = None) -> Call:
    return Call(rank, "mark", detail=text, of=of)
