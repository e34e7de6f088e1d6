"""What a run must show: that each rank holds the shards of the layout, and the claims of `contract.proof`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from contract.layout import cut, layout
from contract.proof import prove
from contract.share import names
from contract.strategy import Run, RunResult
from shardiff.record import Record


def each(runs: Sequence[Run], long: Collection[Run] = (), ids: Callable[[Run], str] | None = None) -> Any:
    """Parametrizes a test by `run`; those in `long` are for `make long` alone."""
    some = [pytest.param(run, marks=[pytest.mark.long] if run in long else []) for run in runs]
    return pytest.mark.parametrize("run", some, ids=ids or label)


def often(cases: Sequence[Any], some: Collection[Any]) -> list[Any]:
    """Cases of a test: those in `some` for `make test`, the others for `make long` alone."""
    values = {case: case if isinstance(case, tuple) else (case,) for case in cases}
    return [case if case in some else pytest.param(*values[case], marks=pytest.mark.long) for case in cases]


def single_device(run: Run) -> Run:
    """The run of the same implementation on one device, where nothing is communicated."""
    return run.on_one_device


def label(run: Run) -> str:
    """A run as the id of a test."""
    sizes = run.problem
    parts = [run.implementation, run.strategy, str(run.mesh), sizes.dtype, run.optimizer]
    parts += [f"B{sizes.batch}", f"L{sizes.layers}"]
    parts.append(f"steps{run.steps}")
    if run.strategy == "pipeline_parallel":
        parts.append(f"m{run.microbatches}")
    return "-".join(parts)


def initial_shards(run: Run) -> list[dict[str, tuple[tuple[int, ...], str, int, str]]]:
    """For each rank, parameter name -> (shape, dtype, bytes, digest of the initial value), from the layout alone."""
    params, dtype, ranks = run.problem.parameters(), run.problem.dtype, []
    for parts in layout(run):
        held = {}
        for part, layer in zip(parts, cut(params, parts), strict=True):
            for name, full in zip(names(part), layer, strict=True):
                array = (
                    full.astype(np.float32).astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else full.astype(dtype)
                )
                held[name] = (array.shape, dtype, array.nbytes, digest(array))
        ranks.append(held)
    return ranks


def digest(array: np.ndarray) -> str:
    """The digest that `Shard.digests` has: of the bits in C order."""
    return hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8), digest_size=8).hexdigest()


def misplaced(run: Run, got: RunResult) -> list[str]:
    """A line for each parameter that a rank does not hold as the layout says at the start."""
    wrong = []
    for rank, want in enumerate(initial_shards(run)):
        held = got.shards[rank]
        for name in sorted(want.keys() | held.keys()):
            shard = held.get(name)
            has = shard and (shard.shape, shard.dtype, shard.nbytes, shard.digests[0])
            if has != want.get(name):
                wrong.append(f"shards: rank {rank} holds {name} as {has}, not {want.get(name)}")
    return wrong


def failures(run: Run, got: RunResult, want: RunResult, own: RunResult | None = None) -> list[str]:
    """A line for each claim that does not hold; the words before the colon name the claim."""
    return [*misplaced(run, got), *prove(run, got, want, own).failures]


def different(one: RunResult, other: RunResult) -> list[str]:
    """The fields that differ in any bit, except grad_norms, which is summed over ranks."""

    def flat(layers: Sequence[Any]) -> list[np.ndarray]:
        return [array for layer in layers for array in layer]

    pairs = {
        "losses": ([one.losses], [other.losses]),
        "grads": (flat(one.grads), flat(other.grads)),
        "params": (flat(one.params), flat(other.params)),
        **{s: (flat(one.optimizer_state[s]), flat(v)) for s, v in other.optimizer_state.items()},
    }
    return [name for name, (a, b) in pairs.items() if not all(map(np.array_equal, a, b))]


def told(records: Sequence[Record]) -> Counter:
    """What two lists of records must have in common: everything except where in the code they come from."""
    return Counter(
        (r.op, r.dtype, r.payload_bytes, r.wire_bytes, r.axis, r.phase, r.executions, r.groups, r.edges)
        for r in records
    )
